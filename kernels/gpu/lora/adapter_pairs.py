"""Groups the pairs of a routing by adapter and expert on the GPU, for the LoRA kernels of experts.

The number of segments depends only on shapes. Segments that a batch does not need are padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux.kernels.gpu.launches import tile_rows, whole_grid
from loramux.kernels.routing import Routing
from loramux.kernels.tables import Segments

PAIR_BLOCK = 1024
"""Number of pairs that a program reads at a time."""


def max_pair_segments(num_pairs: int, num_experts: int, segments: Segments) -> int:
    """An upper bound on the number of segments: in each expert's list, each adapter has at most one partial segment."""
    return whole_grid(min(num_pairs, num_pairs // tile_rows(segments) + num_experts * segments.num_segments))


def adapter_pairs(routing: Routing, slots: torch.Tensor, segments: Segments) -> Segments:
    """List all pairs of rows with an adapter by expert, and divide them into segments of one adapter and expert.

    `slots`, int32 `[T]`, contains the adapter slot of each row, or -1. Only rows of the base may lie between two rows
    of the same adapter, and the rows belong to at most `segments.num_segments` adapters.
    """
    num_pairs, num_experts, device = routing.num_pairs, routing.starts.shape[0] - 1, slots.device
    num_segments = max_pair_segments(num_pairs, num_experts, segments)
    rows = torch.empty(num_pairs, dtype=torch.int32, device=device)
    starts = torch.empty(num_segments + 1, dtype=torch.int32, device=device)
    found, experts = torch.empty(2, num_segments, dtype=torch.int32, device=device)
    if num_segments:
        _list_pairs[(num_experts,)](
            routing.experts, routing.pairs, routing.starts, slots, rows, starts, found, experts, num_pairs,
            num_segments, TOP_K=routing.experts.shape[1], NUM_EXPERTS=num_experts, ROWS=tile_rows(segments),
            BLOCK=PAIR_BLOCK, num_warps=4,
        )  # fmt: skip
    return Segments(rows, starts, found, segments.max_rank, segments.max_rows, experts)


@triton.jit
def _read_pairs(
    begin: tl.tensor,
    end: tl.tensor,
    experts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    expert_starts_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Pairs `[begin, begin + BLOCK)` of the list, their slots, whether they have an adapter and whether they begin a
    segment.

    Entries from `end` on have no adapter and begin no segment.
    """
    listed = begin + tl.arange(0, BLOCK)
    is_listed = listed < end
    pair = tl.load(pairs_ptr + listed, mask=is_listed, other=0)
    slot = tl.load(slots_ptr + pair // TOP_K, mask=is_listed, other=-1)
    expert = tl.load(experts_ptr + pair, mask=is_listed, other=0)
    place = listed - tl.load(expert_starts_ptr + expert, mask=is_listed, other=0)
    is_later = is_listed & (place > 0)
    before = tl.load(pairs_ptr + listed - 1, mask=is_later, other=0)
    slot_before = tl.load(slots_ptr + before // TOP_K, mask=is_later, other=-1)
    has_adapter = slot >= 0
    return pair, slot, has_adapter, has_adapter & ((place % ROWS == 0) | (slot != slot_before))


@triton.jit(do_not_specialize=["num_pairs", "num_segments"])
def _list_pairs(
    experts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    expert_starts_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    segment_slots_ptr: tl.tensor,
    segment_experts_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_segments: tl.tensor,
    TOP_K: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """List the pairs and segments of one expert, after the entries of all experts before it."""
    expert = tl.program_id(0)
    own_begin = tl.load(expert_starts_ptr + expert)
    own_end = tl.load(expert_starts_ptr + expert + 1)
    row = 0
    segment = 0
    # Each program counts the entries of the experts before it. Programs cannot wait for one another, and passing counts
    # on would need another launch.
    for begin in range(0, own_begin, BLOCK):
        _, _, has_adapter, is_first = _read_pairs(
            begin, own_begin, experts_ptr, pairs_ptr, expert_starts_ptr, slots_ptr, TOP_K, ROWS, BLOCK
        )
        row += tl.sum(has_adapter.to(tl.int32), 0)
        segment += tl.sum(is_first.to(tl.int32), 0)
    for begin in range(own_begin, own_end, BLOCK):
        pair, slot, has_adapter, is_first = _read_pairs(
            begin, own_end, experts_ptr, pairs_ptr, expert_starts_ptr, slots_ptr, TOP_K, ROWS, BLOCK
        )
        own_row = row + tl.cumsum(has_adapter.to(tl.int32), 0) - 1
        own_segment = segment + tl.cumsum(is_first.to(tl.int32), 0) - 1
        tl.store(rows_ptr + own_row, pair, mask=has_adapter)
        tl.store(starts_ptr + own_segment, own_row, mask=is_first)
        tl.store(segment_slots_ptr + own_segment, slot, mask=is_first)
        tl.store(segment_experts_ptr + own_segment, expert + slot * 0, mask=is_first)
        row += tl.sum(has_adapter.to(tl.int32), 0)
        segment += tl.sum(is_first.to(tl.int32), 0)
    if expert == NUM_EXPERTS - 1:
        # The kernels launch a program per segment that the shapes allow, so the unused segments must have no adapter.
        tl.store(starts_ptr + segment, row)
        for begin in range(segment, num_segments, BLOCK):
            padding = begin + tl.arange(0, BLOCK)
            tl.store(segment_slots_ptr + padding, tl.full((BLOCK,), -1, tl.int32), mask=padding < num_segments)
