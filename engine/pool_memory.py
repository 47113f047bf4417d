"""The memory behind the page pool; allocated once, at an address that never changes."""

from __future__ import annotations

import torch

from loramux.engine.errors import PoolTooSmall
from loramux.kernels.layout import PageGeometry
from loramux.kernels.tables import PoolViews

DEFAULT_BYTES = 1 << 30
"""What a pool in host memory takes unless it is told otherwise."""

GPU_RESERVE = 0.08
"""The share of a GPU's memory that stays free for activations, graphs and other programs' contexts."""

MIN_RESERVE_BYTES = 2 << 30


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


def pool_bytes_of(wanted: int | None, memory: tuple[int, int] | None) -> int:
    """The pool's size: what was asked for, else on a GPU most of what the model has left.

    `memory` is what `Accelerator.memory` says once the model is loaded. Raises PoolTooSmall when the reserve is all
    that is left, or not even that.
    """
    if wanted is not None:
        return wanted
    if memory is None:
        return DEFAULT_BYTES
    free, total = memory
    reserve = max(MIN_RESERVE_BYTES, int(GPU_RESERVE * total))
    if free <= reserve:
        raise PoolTooSmall(
            f"beside the model the GPU has {in_gib(free)} of its {in_gib(total)} free, and activations need "
            f"{in_gib(reserve)}, which leaves no page pool: end other programs on the GPU, or use a larger GPU"
        )
    return free - reserve


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
