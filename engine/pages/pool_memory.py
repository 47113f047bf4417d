"""The memory behind the page pool; allocated once, at an address that never changes."""

from __future__ import annotations

import torch

from loramux.engine.device.accelerator import DeviceMemory
from loramux.engine.errors import PoolTooSmall
from loramux.kernels.layout import PageGeometry
from loramux.kernels.tables import PoolViews

DEFAULT_BYTES = 1 << 30
"""What a pool in host memory takes unless it is told otherwise."""

GPU_RESERVE = 0.08
"""The share of a GPU's memory that stays free for graphs, with the activations of captured steps, and other programs.

Where nothing is compiled ahead, the activations of all steps come out of it too.
"""

MIN_RESERVE_BYTES = 2 << 30
"""The least that stays free of a GPU's memory, in bytes. An allowance: `Stats.graphs` says what graphs took."""


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


def pool_bytes_of(wanted: int | None, memory: DeviceMemory | None) -> int:
    """The pool's size: what was asked for, else on a GPU most of what the model and its activations have left.

    Raises PoolTooSmall where they leave nothing.
    """
    if wanted is not None:
        return wanted
    if memory is None:
        return DEFAULT_BYTES
    reserve = max(MIN_RESERVE_BYTES, int(GPU_RESERVE * memory.total))
    if memory.free <= reserve:
        raise PoolTooSmall(
            f"{in_gib(memory.free)} of the GPU's {in_gib(memory.total)} are free beside the model, and "
            f"{in_gib(reserve)} are kept for graphs: use a larger GPU or a smaller model, end other programs that use "
            "the GPU, or set pool_bytes to less than what is free"
        )
    return memory.free - reserve


def allocate_pool(
    geometry: PageGeometry, pool_bytes: int, kv_dtype: torch.dtype, adapter_dtype: torch.dtype, device: torch.device
) -> PoolViews:
    """Reserve as many whole pages as `pool_bytes` holds; raises PoolTooSmall when that is none, or more than is free.

    The bytes are not cleared: nobody reads a page before its owner has written it.
    """
    num_pages = pool_bytes // geometry.total_page_bytes
    if num_pages < 1:
        raise PoolTooSmall(
            f"a pool of {pool_bytes} bytes holds no page of {geometry.total_page_bytes} bytes: give it more"
        )
    try:
        raw = torch.empty(num_pages, geometry.num_layers, geometry.page_bytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        raise PoolTooSmall(
            f"a page pool of {in_gib(pool_bytes)} does not fit beside the model: lower pool_bytes, or leave it out"
        ) from error
    return PoolViews(raw=raw, kv=raw.view(kv_dtype), adapter=raw.view(adapter_dtype), geometry=geometry)
