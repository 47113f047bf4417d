"""The memory behind the page pool and the adapter tables; allocated once, at addresses that never change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from loramux.engine.errors import PoolTooSmall
from loramux.kernels.layout import MAX_RANK, LinearShape, PageGeometry, adapter_layout
from loramux.kernels.tables import AdapterTables, PoolViews


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


def allocate_tables(
    geometry: PageGeometry, modules: Sequence[LinearShape], num_slots: int, device: torch.device
) -> AdapterTables:
    """Tables for `num_slots` adapters, wide enough for one of the highest rank on every module."""
    shape = (geometry.num_layers, len(modules))
    max_pages = adapter_layout(geometry, modules, np.full(shape, MAX_RANK, np.int32)).num_pages
    return AdapterTables(
        page_table=torch.zeros(num_slots, max_pages, dtype=torch.int32, device=device),
        off=torch.zeros(num_slots, *shape, 2, dtype=torch.int32, device=device),
        rank=torch.zeros(num_slots, *shape, dtype=torch.int32, device=device),
        scale=torch.zeros(num_slots, *shape, dtype=torch.float32, device=device),
    )
