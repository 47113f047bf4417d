"""Rows of the embedding and the head that an adapter replaces, in plain PyTorch."""

from __future__ import annotations

import torch

from loramux.kernels.layout import LinearShape, PartLayout, row_layout, trained_rows_of
from loramux.kernels.tables import LoraCall, PoolViews


def trained_rows(pool: PoolViews, call: LoraCall, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids int64 `[num_rows]`, ascending, and the rows `[num_rows, row_len]` of the group's only module.

    `pool` contains flat pages, and `call.tables` is `AdapterTables.trained_rows`. Element `e` of the stream is
    `pool[page_table[slot, e // E], 0, e % E]`; the ids are int32 in the same pages, read as units of four bytes.
    """
    group, tables = call.group, call.tables
    (module,), (out_features,) = group.modules, group.out_features
    vocab_size, row_len = trained_rows_of(LinearShape("", group.in_features, out_features, group.is_embedding))
    num_rows = int(tables.rank[slot, 0, module])
    begin, first_id = tables.off[slot, 0, module, :2].tolist()
    part = PartLayout(num_rows, row_layout(row_len, pool.geometry.adapter_elements))
    element = begin + torch.arange(num_rows)[:, None] * part.row.padded_len + torch.arange(row_len)
    ids = torch.arange(num_rows)
    if num_rows < vocab_size:
        ids = _read(pool.raw.view(torch.int32), tables.page_table[slot], first_id + ids).long()
    return ids, _read(pool.adapter, tables.page_table[slot], element)


def _read(pages: torch.Tensor, page_table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    page_size = pages.shape[2]
    return pages[page_table.long()[places // page_size], 0, places % page_size]
