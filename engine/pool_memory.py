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


def pool_bytes_of(wanted: int | None, device: torch.device) -> int:
    """The pool's size: what was asked for, else on a GPU most of what the model has left."""
    if wanted is not None:
        return wanted
    if device.type == "cpu":
        return DEFAULT_BYTES
    # What loading the model left in torch's cache is free as well.
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - max(MIN_RESERVE_BYTES, int(GPU_RESERVE * total)))


def allocate_pool(
    geometry: PageGeometry, pool_bytes: int, kv_dtype: torch.dtype, adapter_dtype: torch.dtype, device: torch.device
) -> PoolViews:
    """Reserve as many whole pages as `pool_bytes` holds; raises PoolTooSmall when that is none.

    The bytes are not cleared: nobody reads a page before its owner has written it.
    """
    num_pages = pool_bytes // geometry.total_page_bytes
    if num_pages < 1:
        raise PoolTooSmall(
            f"a pool of {pool_bytes} bytes holds no page of {geometry.total_page_bytes} bytes: give it more"
        )
    raw = torch.empty(num_pages, geometry.num_layers, geometry.page_bytes, dtype=torch.uint8, device=device)
    return PoolViews(raw=raw, kv=raw.view(kv_dtype), adapter=raw.view(adapter_dtype), geometry=geometry)
