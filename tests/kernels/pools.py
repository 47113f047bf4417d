"""Random adapters in a pool and as dense matrices. All unused elements are NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from loramux.kernels.layout import LinearShape, PageGeometry, adapter_layout, part_layout
from loramux.kernels.tables import AdapterTables, PoolViews


def poisoned_pool(num_pages: int, geometry: PageGeometry, dtype: torch.dtype) -> PoolViews:
    """A pool of NaN. All bits are set, which is NaN in all dtypes. With FP8 codes (uint8), K and V are float32."""
    raw = torch.full((num_pages, geometry.num_layers, geometry.page_bytes), 0xFF, dtype=torch.uint8)
    kv_dtype = torch.float32 if dtype is torch.uint8 else dtype
    return PoolViews(raw=raw, kv=raw.view(kv_dtype), adapter=raw.view(dtype), geometry=geometry)


def poisoned_int8_pool(num_pages: int, geometry: PageGeometry) -> PoolViews:
    """A pool whose K and V are int8 codes of -1 with scales of NaN. Its adapters are float32."""
    raw = torch.full((num_pages, geometry.num_layers, geometry.page_bytes), 0xFF, dtype=torch.uint8)
    scales = torch.full((num_pages, geometry.num_layers, geometry.num_scales), torch.nan, dtype=torch.bfloat16)
    return PoolViews(
        raw=raw, kv=raw.view(torch.int8), adapter=raw.view(torch.float32), geometry=geometry, kv_scales=scales
    )


@dataclass(frozen=True, slots=True, eq=False)
class AdapterPool:
    """Resident adapters, stored in pages and as dense A `[rank, in]` and Bᵀ `[rank, out]` by slot, layer and module.

    Adapters in odd slots have affines `[2, out]`.
    """

    pool: PoolViews
    tables: AdapterTables
    a: dict[tuple[int, int, int], torch.Tensor]
    b: dict[tuple[int, int, int], torch.Tensor]
    affine: dict[tuple[int, int, int], torch.Tensor]

    def output(self, slot: int, layer: int, module: int, y: torch.Tensor) -> torch.Tensor:
        """The module's output if A and B yield `y`, in the dtype of `y`."""
        if slot % 2 == 0 or not self.a[slot, layer, module].shape[0]:
            return y
        gain, shift = self.affine[slot, layer, module].to(y.dtype)
        return y + gain * y + shift


def adapter_pool(
    modules: Sequence[LinearShape],
    ranks: npt.NDArray[np.int32],
    geometry: PageGeometry,
    dtype: torch.dtype,
) -> AdapterPool:
    """Fill shuffled pages with random adapters of `ranks` `[num_slots, num_layers, num_modules]`."""
    num_slots = ranks.shape[0]
    layouts = [
        adapter_layout(geometry, modules, slot_ranks, has_affines=slot % 2 == 1)
        for slot, slot_ranks in enumerate(ranks)
    ]
    longest = max(layout.num_pages for layout in layouts) + 1
    # Unused table entries point to the last page, which contains only NaN.
    poison = sum(layout.num_pages for layout in layouts)
    pool = poisoned_pool(poison + 1, geometry, dtype)
    free = torch.randperm(poison, dtype=torch.int32)
    page_table = torch.full((num_slots, longest), poison, dtype=torch.int32)
    dense: tuple[dict[tuple[int, int, int], torch.Tensor], ...] = ({}, {}, {})
    for slot, layout in enumerate(layouts):
        page_table[slot, : layout.num_pages], free = free[: layout.num_pages], free[layout.num_pages :]
        pages = page_table[slot, : layout.num_pages].long()
        for layer in range(geometry.num_layers):
            stream = pool.adapter[pages, layer].flatten()
            for m, module in enumerate(modules):
                rank, offsets = layout.rank_and_offsets(layer, m)
                for index in layout.parts:
                    part = part_layout(module, index, rank, geometry.adapter_elements)
                    rows = torch.randn(part.num_rows if rank else 0, part.row.row_len)
                    rows = rows.to(torch.float8_e4m3fn if dtype is torch.uint8 else dtype)
                    dense[index][slot, layer, m] = rows.float()
                    if rows.shape[0]:
                        place = stream.as_strided(rows.shape, (part.row.padded_len, 1), int(offsets[index]))
                        place.copy_(rows.view(dtype))
            pool.adapter[pages, layer] = stream.view(len(pages), geometry.adapter_elements)
    tables = AdapterTables(
        page_table=page_table,
        off=torch.tensor(np.stack([layout.offsets for layout in layouts])),
        rank=torch.tensor(ranks),
        scale=torch.rand(*ranks.shape) + 0.5,
    )
    return AdapterPool(pool, tables, *dense)
