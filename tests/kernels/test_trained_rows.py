"""Rows of the embedding and the head that adapters replace, for every implementation of the kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from loramux.kernels.layout import (
    ID_BYTES,
    MAX_EXTRA_TOKENS,
    LinearShape,
    PageGeometry,
    RowCounts,
    adapter_layout,
    row_layout,
)
from loramux.kernels.segments import build_segments
from loramux.kernels.tables import AdapterTables, LoraCall, ModuleGroup, Segments

GEOMETRY = {
    torch.float32: PageGeometry(num_layers=3, num_kv_heads=2, head_dim=8, kv_itemsize=4, adapter_itemsize=4),
    torch.bfloat16: PageGeometry(num_layers=2, num_kv_heads=1, head_dim=40, kv_itemsize=2, adapter_itemsize=2),
}
"""Pages of 3 * 512 or 2 * 1,280 elements. Neither size is a power of two."""

VOCAB_SIZE, HIDDEN_SIZE = 333, 72
NUM_TOKENS = VOCAB_SIZE + 9
"""The largest vocabulary of an adapter."""
MODULES = (
    LinearShape("embedding", VOCAB_SIZE, HIDDEN_SIZE, is_embedding=True),
    LinearShape("head", HIDDEN_SIZE, VOCAB_SIZE),
)
EMBEDDING = ModuleGroup((0,), VOCAB_SIZE, (HIDDEN_SIZE,), (0,), is_embedding=True)
HEAD = ModuleGroup((1,), HIDDEN_SIZE, (VOCAB_SIZE,), (0,))
ROWS = (
    RowCounts((3, 0)),
    RowCounts((0, 41)),
    RowCounts((VOCAB_SIZE, 5)),
    RowCounts((7, 7), is_shared=True),
    RowCounts(),
    RowCounts((1, VOCAB_SIZE)),
    RowCounts((NUM_TOKENS, NUM_TOKENS), is_shared=True),
    RowCounts((9, 14)),
)
"""Numbers of trained rows of the embedding and the head, by slot. The last two slots have more tokens than the base."""

BATCHES = {
    "mixed": [-1, 0, 2, 2, -1, 3, 0, 2, 4, -1, 3, 2, 2, 1, 5, 5],
    "one adapter": [2] * 40,
    "each its own": [3, 0, 5],
    "further tokens": [6, 7, -1, 7, 6, 7, 2, 6, 7],
    "no adapter": [-1, -1],
}


class TrainedPool:
    """Adapters with trained rows, also as ids and dense rows, in shuffled pages of a pool that is otherwise NaN."""

    def __init__(self, make_poisoned_pool: Callable[..., Any], dtype: torch.dtype) -> None:
        geometry, flat = GEOMETRY[dtype], GEOMETRY[dtype].flat
        no_ranks = np.zeros((geometry.num_layers, 0), np.int32)
        ranks = np.array([2, 1], np.int32)
        layouts = [adapter_layout(geometry, (), no_ranks, MODULES, ranks, rows=rows) for rows in ROWS]
        num_pages = sum(layout.num_pages for layout in layouts)
        self.pool = make_poisoned_pool(num_pages + 1, geometry, dtype)
        # Unused table entries point to the last page, which contains only NaN.
        page_table = torch.full((len(ROWS), max(layout.num_pages for layout in layouts) + 1), num_pages).int()
        free = torch.randperm(num_pages, dtype=torch.int32)
        self.ids: dict[tuple[int, int], list[int]] = {}
        self.rows: dict[tuple[int, int], torch.Tensor] = {}
        elements = self.pool.adapter.view(num_pages + 1, -1)
        words = self.pool.raw.view(torch.int32).view(num_pages + 1, -1)
        padded_len = row_layout(HIDDEN_SIZE, flat.adapter_elements).padded_len
        for slot, layout in enumerate(layouts):
            assert layout.num_pages == layout.num_outer_pages
            page_table[slot, : layout.num_pages], free = free[: layout.num_pages], free[layout.num_pages :]
            pages = page_table[slot].long()
            for m, count in enumerate(layout.rows.counts or (0, 0)):
                begin, first_id = layout.row_offsets[m, :2].tolist()
                if m and layout.rows.is_shared:
                    self.ids[slot, m], self.rows[slot, m] = self.ids[slot, 0], self.rows[slot, 0]
                    assert layout.row_offsets[1].tolist() == layout.row_offsets[0].tolist()
                    continue
                vocab_size = VOCAB_SIZE if slot < 6 else NUM_TOKENS
                ids = torch.randperm(vocab_size, dtype=torch.int32)[:count]
                if slot == 7:
                    ids[:9] = torch.arange(VOCAB_SIZE, NUM_TOKENS)
                ids = ids.sort().values
                rows = torch.randn(count, HIDDEN_SIZE).to(dtype)
                e = begin + torch.arange(count)[:, None] * padded_len + torch.arange(HIDDEN_SIZE)
                elements[pages[e // elements.shape[1]], e % elements.shape[1]] = rows
                if count < VOCAB_SIZE:
                    place = first_id + torch.arange(count)
                    words[pages[place // words.shape[1]], place % words.shape[1]] = ids
                self.ids[slot, m], self.rows[slot, m] = ids.tolist(), rows
        counts = torch.tensor([rows.counts or (0, 0) for rows in ROWS], dtype=torch.int32)[:, None]
        self.tables = AdapterTables(
            page_table=page_table,
            off=torch.tensor(np.stack([layout.row_offsets for layout in layouts]))[:, None],
            rank=counts,
            scale=torch.ones(counts.shape),
        )


def segments_of(slots: Sequence[int], kernels: Any) -> Segments:
    """Segments of the rows with an adapter, plus an empty segment if the device pads its steps."""
    segments = build_segments(np.array(slots, np.int32), kernels.segment_rows, NUM_TOKENS)
    device = torch.get_default_device()
    parts = [segments.rows, segments.starts, segments.slots]
    if kernels.segment_rows == 16:
        parts = [
            torch.cat([part, torch.tensor([value], dtype=torch.int32, device="cpu")])
            for part, value in zip(parts, (1 << 30, 1 << 30, -1), strict=True)
        ]
    rows, starts, listed = (part.to(device) for part in parts)
    return Segments(rows, starts, listed, segments.max_rank)


@pytest.mark.parametrize("slots", BATCHES.values(), ids=BATCHES.keys())
def test_embeddings_of_trained_tokens_are_copied(
    slots: list[int], dtype: torch.dtype, make_kernels: Callable[..., Any], make_poisoned_pool: Callable[..., Any]
) -> None:
    adapters = TrainedPool(make_poisoned_pool, dtype)
    kernels = make_kernels(adapters.pool).outer
    tokens = torch.randint(VOCAB_SIZE, (len(slots),))
    for t, slot in enumerate(slots):
        ids = adapters.ids.get((slot, 0), [])
        # Most rows are trained: the first, the last, and the neighbours of untrained rows.
        if ids and t % 4:
            tokens[t] = ids[(0, -1, len(ids) // 2)[t % 3]] + (1 if t % 4 == 3 and ids[-1] < VOCAB_SIZE - 1 else 0)
    y = torch.randn(len(slots), HIDDEN_SIZE).to(dtype)
    before = y.clone()
    call = LoraCall(0, EMBEDDING, adapters.tables, segments_of(slots, kernels))
    kernels.replace_rows(tokens.int(), call, y)
    for t, slot in enumerate(slots):
        ids = adapters.ids.get((slot, 0), [])
        token = int(tokens[t])
        assert torch.equal(y[t], adapters.rows[slot, 0][ids.index(token)] if token in ids else before[t]), t


@pytest.mark.parametrize("slots", BATCHES.values(), ids=BATCHES.keys())
def test_logits_of_trained_tokens_are_computed_with_their_rows(
    slots: list[int], dtype: torch.dtype, make_kernels: Callable[..., Any], make_poisoned_pool: Callable[..., Any]
) -> None:
    adapters = TrainedPool(make_poisoned_pool, dtype)
    kernels = make_kernels(adapters.pool).outer
    x, y = torch.randn(len(slots), HIDDEN_SIZE), torch.randn(len(slots), NUM_TOKENS + 3)[:, :NUM_TOKENS]
    before = y.clone()
    call = LoraCall(0, HEAD, adapters.tables, segments_of(slots, kernels))
    kernels.replace_columns(x, call, y)
    for t, slot in enumerate(slots):
        expected = before[t].double()
        ids = adapters.ids.get((slot, 1), [])
        if ids:
            expected[ids] = adapters.rows[slot, 1].double() @ x[t].double()
        others = torch.ones(NUM_TOKENS, dtype=torch.bool)
        others[ids] = False
        assert torch.equal(y[t][others], before[t][others])
        torch.testing.assert_close(y[t].double(), expected, rtol=1e-4, atol=1e-4)


def test_rows_and_ids_are_stored_once_and_behind_the_outer_modules() -> None:
    geometry = GEOMETRY[torch.bfloat16]
    no_ranks, ranks = np.zeros((2, 0), np.int32), np.array([3, 2], np.int32)

    def laid_out(rows: RowCounts) -> Any:
        return adapter_layout(geometry, (), no_ranks, MODULES, ranks, rows=rows)

    plain, shared, separate = laid_out(RowCounts()), laid_out(RowCounts((9, 9), True)), laid_out(RowCounts((9, 9)))
    assert np.array_equal(plain.outer_offsets, shared.outer_offsets)
    padded_len = row_layout(HIDDEN_SIZE, geometry.flat.adapter_elements).padded_len
    begin, first_id = shared.row_offsets[0, :2].tolist()
    assert begin > plain.outer_offsets.max()
    assert first_id * ID_BYTES == (begin + 9 * padded_len) * geometry.adapter_itemsize
    assert separate.row_offsets[1, 0] * geometry.adapter_itemsize >= (first_id + 9) * ID_BYTES
    # A whole weight needs no ids.
    whole = laid_out(RowCounts((VOCAB_SIZE, 1)))
    assert whole.row_offsets[1, 0] - whole.row_offsets[0, 0] == VOCAB_SIZE * padded_len


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (RowCounts((VOCAB_SIZE + MAX_EXTRA_TOKENS + 1, 0)), "outside"),
        (RowCounts((-1, 0)), "outside"),
        (RowCounts((1, 0, 0)), "rows of 3 modules"),
    ],
)
def test_impossible_rows_are_refused(rows: RowCounts, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        adapter_layout(GEOMETRY[torch.float32], (), np.zeros((3, 0), np.int32), MODULES, rows=rows)


def test_rows_beyond_32_bit_offsets_are_refused() -> None:
    modules = (replace(MODULES[0], in_features=1 << 19, out_features=1 << 12),)
    geometry = replace(GEOMETRY[torch.bfloat16], num_kv_heads=8, head_dim=128)
    with pytest.raises(ValueError, match="offsets reach only"):
        adapter_layout(geometry, (), np.zeros((2, 0), np.int32), modules, rows=RowCounts((1 << 19,)))


def test_modules_with_different_numbers_of_rows_cannot_share_them() -> None:
    with pytest.raises(ValueError, match="cannot share"):
        RowCounts((3, 4), is_shared=True)
