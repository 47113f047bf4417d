"""LoRA's expand on the CPU: adds rows of B, read directly from pages and weighted by planes, to the outputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from loramux.kernels.cpu.instructions.blocks import (
    COLUMNS_STEP,
    add_ranks,
    add_ranks_to_sums,
    eight_rows,
    five_rows,
    four_rows,
    six_rows,
    three_rows,
    two_rows,
)
from loramux.kernels.cpu.instructions.compiled import helper
from loramux.kernels.cpu.instructions.vectors import PANEL, floats_at, prefetch, widen
from loramux.kernels.cpu.lora.addresses import B_CHUNK, B_PADDED, COLUMN, MODULE, OUT, place, place_in, step_on
from loramux.kernels.cpu.lora.affines import apply_affine
from loramux.kernels.cpu.lora.tasks import IS_WIDE, RANKS, READ_COST, share_of
from loramux.kernels.layout import AFFINE, MAX_CHUNK, NO_AFFINE, B

RANK_BLOCK = 64
"""Number of ranks whose contributions are summed before being added to an output."""


class _ExpandVisit(NamedTuple):
    """One visit: columns of up to RANK_BLOCK ranks, read once for all rows of a segment.

    All fields are int64 except the float32 `factor`; `planes` and `y` are addresses. `gain` and `shift` are the pool
    indices of the affine to apply afterwards, or NO_AFFINE.
    """

    segment: Any
    planes: Any
    y: Any
    num_ranks: Any
    factor: Any
    length: Any
    gain: Any
    shift: Any


@helper
def _expand_row(
    v: int, y: int, pool: Any, places: Any, ahead: Any, num_ranks: int, factor: Any, length: int, sums: Any
) -> None:  # fmt: skip
    """Add the contributions of `num_ranks` ranks to `length` columns of one row. `length` is a multiple of 16.

    `sums` is scratch for the contributions, so that each rank's row can be read sequentially. Summation is in the same
    order as in `add_ranks`. `ahead` contains the places of the ranks to be read next.
    """
    for e in range(length):
        sums[e] = np.float32(0)
    r = 0
    while r < num_ranks:
        if r + RANKS <= num_ranks:
            n = r + RANKS
            n0, n1, n2, n3 = ahead[0], ahead[1], ahead[2], ahead[3]
            if n + RANKS <= num_ranks:
                n0, n1, n2, n3 = places[n], places[n + 1], places[n + 2], places[n + 3]
            add_ranks_to_sums(
                v + 4 * r, pool, (places[r], places[r + 1], places[r + 2], places[r + 3]), (n0, n1, n2, n3),
                length, sums.ctypes.data,
            )  # fmt: skip
            r += RANKS
        else:
            add_ranks_to_sums(v + 4 * r, pool, (places[r],), (ahead[0],), length, sums.ctypes.data)
            r += 1
    row = floats_at(y)
    for e in range(length):
        row[e] += factor * sums[e]


@helper
def _expand_segment(
    planes: int, plane_step: int, y: int, y_step: int, rows: Any, begin: int, end: int,
    pool: Any, places: Any, ahead: Any, num_ranks: int, factor: Any, length: int, sums: Any,
) -> None:  # fmt: skip
    """Add the contributions of `num_ranks` ranks to `length` columns of all rows of a segment, in as few blocks of rows
    as possible.

    Each block reads and widens the ranks again.
    """
    whole = length - length % PANEL
    if end - begin > 1:
        # Only a single row is multiplied by the ranks in order, and can prefetch as it goes.
        for k in range(num_ranks):
            for e in range(0, length, COLUMNS_STEP):
                prefetch(pool, ahead[k] + e)
    j = begin
    while j < end:
        if IS_WIDE and end - j >= 8:
            v8, y8 = eight_rows(planes, plane_step, rows, j), eight_rows(y, y_step, rows, j)
            for e in range(0, whole, PANEL):
                add_ranks(v8, pool, places, e, num_ranks, factor, y8)
            taken = 8
        elif IS_WIDE and end - j >= 6:
            v6, y6 = six_rows(planes, plane_step, rows, j), six_rows(y, y_step, rows, j)
            for e in range(0, whole, PANEL):
                add_ranks(v6, pool, places, e, num_ranks, factor, y6)
            taken = 6
        elif IS_WIDE and end - j == 5:
            v5, y5 = five_rows(planes, plane_step, rows, j), five_rows(y, y_step, rows, j)
            for e in range(0, whole, PANEL):
                add_ranks(v5, pool, places, e, num_ranks, factor, y5)
            taken = 5
        elif end - j >= 4:
            v4, y4 = four_rows(planes, plane_step, rows, j), four_rows(y, y_step, rows, j)
            for e in range(0, whole, PANEL):
                add_ranks(v4, pool, places, e, num_ranks, factor, y4)
            taken = 4
        elif end - j == 3:
            v3, y3 = three_rows(planes, plane_step, rows, j), three_rows(y, y_step, rows, j)
            for e in range(0, whole, PANEL):
                add_ranks(v3, pool, places, e, num_ranks, factor, y3)
            taken = 3
        elif end - j == 2:
            v2, y2 = two_rows(planes, plane_step, rows, j), two_rows(y, y_step, rows, j)
            for e in range(0, whole, PANEL):
                add_ranks(v2, pool, places, e, num_ranks, factor, y2)
            taken = 2
        else:
            t = np.int64(rows[j])
            _expand_row(planes + t * plane_step, y + t * y_step, pool, places, ahead, num_ranks, factor, whole, sums)
            taken = 1
        for i in range(j, j + taken):
            row = floats_at(y + np.int64(rows[i]) * y_step)
            plane = floats_at(planes + np.int64(rows[i]) * plane_step)
            for e in range(whole, length):
                value = np.float32(0)
                for r in range(num_ranks):
                    value += plane[r] * widen(pool[places[r] + e])
                row[e] += factor * value
        j += taken


@helper
def _expand_visit(
    visit: Any, places: Any, ahead: Any, row_stride: int, y_stride: int, pool: Any, rows: Any,
    starts: Any, sums: Any,
) -> None:  # fmt: skip
    """Process one visit. `ahead` contains the pool indices at which the ranks of the next visit begin."""
    begin, end = np.int64(starts[visit.segment]), np.int64(starts[visit.segment + 1])
    if visit.gain != NO_AFFINE:
        for e in range(0, visit.length, COLUMNS_STEP):
            prefetch(pool, visit.gain + e)
            prefetch(pool, visit.shift + e)
    _expand_segment(
        visit.planes, 4 * row_stride, visit.y, 4 * y_stride, rows, begin, end,
        pool, places, ahead, visit.num_ranks, visit.factor, visit.length, sums,
    )  # fmt: skip
    if visit.gain != NO_AFFINE:
        apply_affine(visit.y, 4 * y_stride, rows, begin, end, pool, visit.gain, visit.shift, visit.length)


@helper
def _expand_tasks(slot_rank: int, num_rows: int, out_features: int, chunk_len: int) -> Any:
    """Number of tasks of a segment in one module (one per chunk of columns), and the cost of each task."""
    return (out_features + chunk_len - 1) // chunk_len, chunk_len * slot_rank * (num_rows + READ_COST)


@helper
def expand_work(plan: Any, layer: int, rank: Any, starts: Any, slots: Any, shifts: Any) -> int:
    """Total cost of these segments' tasks, in multiplications."""
    work = 0
    for s in range(slots.shape[0]):
        for i in range(plan.shape[0]):
            slot_rank = np.int64(rank[slots[s], layer, plan[i, MODULE] + shifts[s]])
            count, cost = _expand_tasks(slot_rank, starts[s + 1] - starts[s], plan[i, OUT], plan[i, B_CHUNK])
            work += count * cost
    return work


@helper
def expand_share(
    low: int,
    high: int,
    planes_address: int,
    row_stride: int,
    module_stride: int,
    y_address: int,
    y_stride: int,
    pool: Any,
    layer: int,
    plan: Any,
    page_table: Any,
    off: Any,
    rank: Any,
    scale: Any,
    rows: Any,
    starts: Any,
    slots: Any,
    shifts: Any,
) -> None:
    """Run the tasks that begin at a cumulative cost in `[low, high)`. The total is `expand_work`.

    `low_rank.low_rank` describes the other arguments.
    """
    flat_pool, page_elements = pool.reshape(-1), np.int64(pool.shape[2])
    sums = np.empty(MAX_CHUNK, np.float32)
    # Run each visit only once the next visit is known, so that it can prefetch the next visit's data.
    places, following = np.empty(RANK_BLOCK, np.int64), np.empty(RANK_BLOCK, np.int64)
    zero: Any = np.int64(0)
    none: Any = np.int64(NO_AFFINE)
    visit, is_known = _ExpandVisit(zero, zero, zero, zero, np.float32(0), zero, none, none), False
    cursor = 0
    for s in range(slots.shape[0]):
        pages = page_table[slots[s]]
        for i in range(plan.shape[0]):
            slot_rank = np.int64(rank[slots[s], layer, plan[i, MODULE] + shifts[s]])
            if slot_rank == 0:
                continue
            width, padded_len, chunk_len = plan[i, OUT], plan[i, B_PADDED], plan[i, B_CHUNK]
            count, cost = _expand_tasks(slot_rank, starts[s + 1] - starts[s], width, chunk_len)
            first, last = share_of(cursor, cost, count, low, high)
            cursor += count * cost
            offset = np.int64(off[slots[s], layer, plan[i, MODULE] + shifts[s], B])
            affine = np.int64(off[slots[s], layer, plan[i, MODULE] + shifts[s], AFFINE])
            for begin in range(first * chunk_len, min(last * chunk_len, width), chunk_len):
                for r in range(0, slot_rank, RANK_BLOCK):
                    num_ranks = min(np.int64(RANK_BLOCK), slot_rank - r)
                    first_element = offset + r * padded_len + begin
                    page, inside = first_element // page_elements, first_element % page_elements
                    for k in range(num_ranks):
                        following[k] = place_in(pool, layer, pages, page, inside)
                        page, inside = step_on(page, inside, padded_len, page_elements)
                    for k in range(num_ranks, RANKS):
                        following[k] = following[0]
                    if is_known:
                        _expand_visit(visit, places, following, row_stride, y_stride, flat_pool, rows, starts, sums)
                    places, following, is_known = following, places, True
                    gain, shift = none, none
                    if affine != NO_AFFINE and r + num_ranks == slot_rank:
                        gain = place(pool, layer, pages, affine + begin)
                        shift = place(pool, layer, pages, affine + padded_len + begin)
                    visit = _ExpandVisit(
                        np.int64(s), planes_address + 4 * (i * module_stride + r),
                        y_address + 4 * (plan[i, COLUMN] + begin), num_ranks,
                        scale[slots[s], layer, plan[i, MODULE] + shifts[s]], min(chunk_len, width - begin), gain, shift,
                    )  # fmt: skip
    if is_known:
        _expand_visit(visit, places, places, row_stride, y_stride, flat_pool, rows, starts, sums)
