"""A pool of random adapters, which are also kept as dense matrices. All unused elements are NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from loramux.kernels.layout import LinearShape, PageGeometry, adapter_layout, row_layout
from loramux.kernels.tables import AdapterTables, PoolViews


def poisoned_pool(num_pages: int, geometry: PageGeometry, dtype: torch.dtype) -> PoolViews:
    """A pool of NaN. All bits are set, which is NaN in both dtypes."""
    raw = torch.full((num_pages, geometry.num_layers, geometry.page_bytes), 0xFF, dtype=torch.uint8)
    return PoolViews(raw=raw, kv=raw.view(dtype), adapter=raw.view(dtype), geometry=geometry)


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPool:
    """Resident adapters, stored in pages and as dense A `[rank, in]` and Bᵀ `[rank, out]` by slot, layer and module."""

    pool: PoolViews
    tables: AdapterTables
    a: dict[tuple[int, int, int], torch.Tensor]
    b: dict[tuple[int, int, int], torch.Tensor]


def adapter_pool(
    modules: Sequence[LinearShape],
    ranks: npt.NDArray[np.int32],
    geometry: PageGeometry,
    dtype: torch.dtype,
) -> AdapterPool:
    """Fill shuffled pages with random adapters of `ranks` `[num_slots, num_layers, num_modules]`."""
    num_slots = ranks.shape[0]
    layouts = [adapter_layout(geometry, modules, slot_ranks) for slot_ranks in ranks]
    longest = max(layout.num_pages for layout in layouts) + 1
    # Unused table entries point to the last page, which contains only NaN.
    poison = sum(layout.num_pages for layout in layouts)
    pool = poisoned_pool(poison + 1, geometry, dtype)
    free = torch.randperm(poison, dtype=torch.int32)
    page_table = torch.full((num_slots, longest), poison, dtype=torch.int32)
    a, b = {}, {}
    for slot, layout in enumerate(layouts):
        page_table[slot, : layout.num_pages], free = free[: layout.num_pages], free[layout.num_pages :]
        for layer in range(geometry.num_layers):
            for m, module in enumerate(modules):
                for half, (dense, row_len) in enumerate(((a, module.in_features), (b, module.out_features))):
                    rows = torch.randn(int(ranks[slot, layer, m]), row_len).to(dtype)
                    dense[slot, layer, m] = rows.float()
                    padded_len = row_layout(row_len, geometry.adapter_elements).padded_len
                    starts = int(layout.offsets[layer, m, half]) + torch.arange(rows.shape[0]) * padded_len
                    e = starts[:, None] + torch.arange(row_len)
                    page = page_table[slot].long()[e // geometry.adapter_elements]
                    pool.adapter[page, layer, e % geometry.adapter_elements] = rows
    tables = AdapterTables(
        page_table=page_table,
        off=torch.tensor(np.stack([layout.offsets for layout in layouts])),
        rank=torch.tensor(ranks),
        scale=torch.rand(*ranks.shape) + 0.5,
    )
    return AdapterPool(pool, tables, a, b)
