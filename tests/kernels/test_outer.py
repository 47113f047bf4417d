from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from loramux.kernels.layout import AFFINE, A, B, LinearShape, PageGeometry, adapter_layout, part_layout
from loramux.kernels.segments import build_segments
from loramux.kernels.tables import AdapterTables, LoraCall, ModuleGroup, Segments

GEOMETRY = {
    torch.float32: PageGeometry(num_layers=3, num_kv_heads=2, head_dim=8, kv_itemsize=4, adapter_itemsize=4),
    torch.bfloat16: PageGeometry(num_layers=2, num_kv_heads=1, head_dim=40, kv_itemsize=2, adapter_itemsize=2),
}
"""Pages of 3 * 512 or 2 * 1,280 elements. Neither size is a power of two, and many tokens' rows straddle two pages."""

VOCAB_SIZE, HIDDEN_SIZE = 333, 72
MODULES = (
    LinearShape("embedding", VOCAB_SIZE, HIDDEN_SIZE, is_embedding=True),
    LinearShape("head", HIDDEN_SIZE, VOCAB_SIZE),
)
EMBEDDING = ModuleGroup((0,), VOCAB_SIZE, (HIDDEN_SIZE,), (0,), is_embedding=True)
HEAD = ModuleGroup((1,), HIDDEN_SIZE, (VOCAB_SIZE,), (0,))
RANKS = ((3, 0), (0, 7), (31, 64), (1, 1), (0, 0))
"""Ranks of the embedding and of the head, by slot."""

WITH_AFFINES = (2, 3)
"""Slots of the adapters with affines."""

BATCHES = {
    "mixed": [-1, 0, 2, 2, -1, 3, 0, 2, 4, -1, 3, 2, 2],
    "one adapter": [2] * 40,
    "each its own": [3, 0, 2],
    "no adapter": [-1, -1],
}


class OuterPool:
    """Adapters with outer modules, as dense matrices and in a pool that is otherwise NaN."""

    def __init__(self, make_poisoned_pool: Callable[..., Any], dtype: torch.dtype) -> None:
        geometry, flat = GEOMETRY[dtype], GEOMETRY[dtype].flat
        no_ranks = np.zeros((geometry.num_layers, 0), np.int32)
        layouts = [
            adapter_layout(geometry, (), no_ranks, MODULES, np.array(ranks, np.int32), has_affines=slot in WITH_AFFINES)
            for slot, ranks in enumerate(RANKS)
        ]
        num_pages = sum(layout.num_pages for layout in layouts)
        self.pool = make_poisoned_pool(num_pages + 1, geometry, dtype)
        # Unused table entries point to the last page, which contains only NaN.
        page_table = torch.full((len(RANKS), max(layout.num_pages for layout in layouts) + 1), num_pages).int()
        free = torch.randperm(num_pages, dtype=torch.int32)
        self.dense: dict[tuple[int, int, int], torch.Tensor] = {}
        elements = self.pool.adapter.view(num_pages + 1, -1)
        for slot, layout in enumerate(layouts):
            assert layout.num_pages == layout.num_outer_pages
            page_table[slot, : layout.num_pages], free = free[: layout.num_pages], free[layout.num_pages :]
            for m, module in enumerate(MODULES):
                rank, begins = layout.rank_and_offsets(None, m)
                for half in layout.parts:
                    part = part_layout(module, half, rank, flat.adapter_elements)
                    rows = torch.randn(part.num_rows if rank else 0, part.row.row_len).to(dtype)
                    self.dense[slot, m, half] = rows.float()
                    starts = begins[half] + torch.arange(rows.shape[0]) * part.row.padded_len
                    e = starts[:, None] + torch.arange(part.row.row_len)
                    page = page_table[slot].long()[e // flat.adapter_elements]
                    elements[page, e % flat.adapter_elements] = rows
        ranks = torch.tensor(RANKS, dtype=torch.int32)[:, None]
        self.tables = AdapterTables(
            page_table=page_table,
            off=torch.tensor(np.stack([layout.outer_offsets for layout in layouts]))[:, None],
            rank=ranks,
            scale=torch.rand(ranks.shape) + 0.5,
        )

    def output(self, slot: int, module: int, y: torch.Tensor) -> torch.Tensor:
        """The module's output if A and B yield `y`, float64."""
        if slot not in WITH_AFFINES:
            return y
        gain, shift = self.dense[slot, module, AFFINE].double()
        return y + gain * y + shift


def segments_of(slots: Sequence[int], module: int, kernels: Any) -> Segments:
    """Segments of the rows whose adapters change the module. If the device pads its steps, an empty segment follows."""
    slots = [slot if slot >= 0 and RANKS[slot][module] else -1 for slot in slots]
    segments = build_segments(np.array(slots, np.int32), kernels.segment_rows, 64)
    device = torch.get_default_device()
    parts = [segments.rows, segments.starts, segments.slots]
    if kernels.segment_rows == 16:
        parts = [
            torch.cat([part, torch.tensor([value], dtype=torch.int32, device="cpu")])
            for part, value in zip(parts, (1 << 30, 1 << 30, -1), strict=True)
        ]
    rows, starts, listed = (part.to(device) for part in parts)
    return Segments(rows, starts, listed, segments.max_rank)


def summed(planes: torch.Tensor) -> torch.Tensor:
    return planes.sum(0) if planes.dim() == 4 else planes


@pytest.mark.parametrize("slots", BATCHES.values(), ids=BATCHES.keys())
def test_embedding_adds_the_row_of_each_token(
    slots: list[int], dtype: torch.dtype, make_kernels: Callable[..., Any], make_poisoned_pool: Callable[..., Any]
) -> None:
    adapters = OuterPool(make_poisoned_pool, dtype)
    kernels = make_kernels(adapters.pool).outer
    # Include the last token, whose row ends where the next module begins.
    tokens = torch.cat([torch.tensor([VOCAB_SIZE - 1]), torch.randint(VOCAB_SIZE, (len(slots) - 1,))]).int()
    segments = segments_of(slots, 0, kernels)
    call = LoraCall(0, EMBEDDING, adapters.tables, segments)
    planes = kernels.lora_planes(call, len(slots)).fill_(torch.nan)
    kernels.lora_gather(tokens, call, planes)
    y = torch.randn(len(slots), HIDDEN_SIZE)
    before = y.clone()
    kernels.lora_expand(planes, call, y)
    v = summed(planes)
    assert v.shape == (len(slots), 1, 64)
    for t, slot in enumerate(slots):
        rank = RANKS[slot][0] if slot >= 0 else 0
        assert v[t, 0, rank:].isnan().all()
        if not rank:
            assert torch.equal(y[t], before[t])
            continue
        a, b = adapters.dense[slot, 0, A][int(tokens[t])], adapters.dense[slot, 0, B]
        assert torch.equal(v[t, 0, :rank], a)
        delta = adapters.tables.scale[slot, 0, 0].double() * (a.double() @ b.double())
        expected = adapters.output(slot, 0, before[t] + delta)
        torch.testing.assert_close(y[t].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("slots", BATCHES.values(), ids=BATCHES.keys())
def test_head_adds_to_the_logits(
    slots: list[int], dtype: torch.dtype, make_kernels: Callable[..., Any], make_poisoned_pool: Callable[..., Any]
) -> None:
    adapters = OuterPool(make_poisoned_pool, dtype)
    kernels = make_kernels(adapters.pool).outer
    x, y = torch.randn(len(slots), HIDDEN_SIZE), torch.randn(len(slots), VOCAB_SIZE)
    before = y.clone()
    segments = segments_of(slots, 1, kernels)
    call = LoraCall(0, HEAD, adapters.tables, segments)
    planes = kernels.lora_planes(call, len(slots)).fill_(torch.nan)
    kernels.lora_shrink(x, call, planes)
    kernels.lora_expand(planes, call, y)
    for t, slot in enumerate(slots):
        if slot < 0 or not RANKS[slot][1]:
            assert torch.equal(y[t], before[t])
            continue
        a, b = adapters.dense[slot, 1, A].double(), adapters.dense[slot, 1, B].double()
        delta = adapters.tables.scale[slot, 0, 1].double() * (a @ x[t].double()) @ b
        expected = adapters.output(slot, 1, before[t] + delta)
        torch.testing.assert_close(y[t].double(), expected, rtol=1e-4, atol=1e-3)


def test_large_vocabulary_memory_is_proportional_to_rank() -> None:
    """Rows of an embedding's A are not padded. 256k tokens at rank 1 take half a megabyte."""
    geometry = PageGeometry(num_layers=16, num_kv_heads=8, head_dim=64, kv_itemsize=2, adapter_itemsize=2)
    modules = (LinearShape("embedding", 1 << 18, 2048, is_embedding=True), LinearShape("head", 2048, 1 << 18))
    no_ranks = np.zeros((16, 0), np.int32)
    for rank in (1, 5, 64, 256):
        layout = adapter_layout(geometry, (), no_ranks, modules, np.full(2, rank, np.int32))
        num_elements = 2 * rank * ((1 << 18) + 2048)
        assert 0 <= layout.num_pages * geometry.total_page_bytes - 2 * num_elements < 2 * geometry.total_page_bytes
        assert layout.outer_offsets[:, :AFFINE].min() >= 0
