"""LoRA's shrink on the CPU: products of the activations with rows of A, read directly from pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from loramux.kernels.cpu.instructions.blocks import dots, five_rows, four_rows, six_rows, three_rows, two_rows
from loramux.kernels.cpu.instructions.compiled import exact, helper
from loramux.kernels.cpu.instructions.vectors import LANES, floats_at, widen
from loramux.kernels.cpu.lora.addresses import A_PADDED, IN, MODULE, place_in, step_on
from loramux.kernels.cpu.lora.tasks import IS_WIDE, RANKS, READ_COST, share_of

MAX_RUN = 2048
"""Maximum number of elements in a run, which is a contiguous part of one rank's row of A. Four runs stay in the L1
cache while a segment's rows are multiplied by them.
"""


class _ShrinkVisit(NamedTuple):
    """One visit: a run of one rank, or of each of RANKS ranks, read once for all rows of a segment.

    All fields are int64 except the flag `is_first`. `x` and `planes` are addresses.
    """

    segment: Any
    x: Any
    planes: Any
    num_ranks: Any
    length: Any
    is_first: Any


@helper
def _places_and_length(pool: Any, layer: int, pages: Any, e: int, step: int, count: int) -> Any:
    """Pool indices at which the next runs of `count` rows begin, and the maximum number of elements in each run.

    The first run begins at element `e` of the stream in `pages`, and the rows are `step` elements apart. `count` is
    RANKS or 1. If it is 1, the single index is returned RANKS times.
    """
    page_elements = np.int64(pool.shape[2])
    page, inside = e // page_elements, e % page_elements
    a = place_in(pool, layer, pages, page, inside)
    length: Any = min(MAX_RUN, page_elements - inside)
    if count != RANKS:
        return (a, a, a, a), length
    page, inside = step_on(page, inside, step, page_elements)
    b = place_in(pool, layer, pages, page, inside)
    length = min(length, page_elements - inside)
    page, inside = step_on(page, inside, step, page_elements)
    c = place_in(pool, layer, pages, page, inside)
    length = min(length, page_elements - inside)
    page, inside = step_on(page, inside, step, page_elements)
    d = place_in(pool, layer, pages, page, inside)
    return (a, b, c, d), min(length, page_elements - inside)


@exact
def _shrink_rows(x: Any, planes: Any, pool: Any, a: Any, ahead: Any, length: int, is_first: bool) -> None:
    """`planes[r][c] = x[r] · pool[a[c] : a[c] + length]`, added to the old value unless `is_first`."""
    whole = length - length % LANES
    found = dots(x, pool, a, ahead, whole)
    for r in range(len(x)):
        row, plane = floats_at(x[r]), floats_at(planes[r])
        for c in range(len(a)):
            value = found[r * len(a) + c]
            for e in range(whole, length):
                value += row[e] * widen(pool[a[c] + e])
            plane[c] = value if is_first else plane[c] + value


@helper
def _shrink_segment(
    x: int, x_step: int, planes: int, plane_step: int, x_rows: Any, rows: Any, begin: int, end: int,
    pool: Any, a: Any, ahead: Any, length: int, is_first: bool,
) -> None:  # fmt: skip
    """Multiply all rows of a segment by the same runs, in as few blocks of rows as possible.

    Each block reads and widens the runs again.
    """
    j = begin
    while j < end:
        if IS_WIDE and end - j >= 6:
            x_at, plane_at = six_rows(x, x_step, x_rows, j), six_rows(planes, plane_step, rows, j)
            _shrink_rows(x_at, plane_at, pool, a, ahead, length, is_first)
            j += 6
        elif IS_WIDE and end - j == 5:
            x_at, plane_at = five_rows(x, x_step, x_rows, j), five_rows(planes, plane_step, rows, j)
            _shrink_rows(x_at, plane_at, pool, a, ahead, length, is_first)
            j += 5
        elif IS_WIDE and end - j == 4:
            x_at, plane_at = four_rows(x, x_step, x_rows, j), four_rows(planes, plane_step, rows, j)
            _shrink_rows(x_at, plane_at, pool, a, ahead, length, is_first)
            j += 4
        elif end - j >= 3:
            x_at, plane_at = three_rows(x, x_step, x_rows, j), three_rows(planes, plane_step, rows, j)
            _shrink_rows(x_at, plane_at, pool, a, ahead, length, is_first)
            j += 3
        elif end - j == 2:
            x_at, plane_at = two_rows(x, x_step, x_rows, j), two_rows(planes, plane_step, rows, j)
            _shrink_rows(x_at, plane_at, pool, a, ahead, length, is_first)
            j += 2
        else:
            x_at, plane_at = (x + np.int64(x_rows[j]) * x_step,), (planes + np.int64(rows[j]) * plane_step,)
            _shrink_rows(x_at, plane_at, pool, a, ahead, length, is_first)
            j += 1


@helper
def _shrink_visit(
    visit: Any, a: Any, ahead: Any, x_step: int, plane_step: int, pool: Any, x_rows: Any, rows: Any, starts: Any
) -> None:  # fmt: skip
    """Process one visit. `ahead` contains the pool indices at which the runs of the next visit begin."""
    begin, end = np.int64(starts[visit.segment]), np.int64(starts[visit.segment + 1])
    if visit.num_ranks == RANKS:
        _shrink_segment(
            visit.x, x_step, visit.planes, plane_step, x_rows, rows, begin, end, pool, a, ahead, visit.length,
            visit.is_first,
        )  # fmt: skip
    else:
        _shrink_segment(
            visit.x, x_step, visit.planes, plane_step, x_rows, rows, begin, end, pool, (a[0],), (ahead[0],),
            visit.length, visit.is_first,
        )  # fmt: skip


@helper
def _shrink_tasks(slot_rank: int, num_rows: int, in_features: int) -> Any:
    """Number of tasks of a segment in one module (one per 4 ranks), and the cost of each task."""
    return (slot_rank + RANKS - 1) // RANKS, RANKS * in_features * (num_rows + READ_COST)


@helper
def shrink_work(plan: Any, layer: int, rank: Any, starts: Any, slots: Any, shifts: Any) -> int:
    """Total cost of these segments' tasks, in multiplications."""
    work = 0
    for s in range(slots.shape[0]):
        for i in range(plan.shape[0]):
            slot_rank = np.int64(rank[slots[s], layer, plan[i, MODULE] + shifts[s]])
            count, cost = _shrink_tasks(slot_rank, starts[s + 1] - starts[s], plan[i, IN])
            work += count * cost
    return work


@helper
def shrink_share(
    low: int,
    high: int,
    x_address: int,
    x_stride: int,
    planes_address: int,
    row_stride: int,
    module_stride: int,
    pool: Any,
    layer: int,
    plan: Any,
    page_table: Any,
    off: Any,
    rank: Any,
    x_rows: Any,
    rows: Any,
    starts: Any,
    slots: Any,
    shifts: Any,
) -> None:
    """Run the tasks that begin at a cumulative cost in `[low, high)`. The total is `shrink_work`.

    `low_rank.low_rank` describes the other arguments.
    """
    flat_pool = pool.reshape(-1)
    # Run each visit only once the next visit is known, so that it can prefetch the next visit's data.
    zero: Any = np.int64(0)
    visit, at, is_known = _ShrinkVisit(zero, zero, zero, zero, zero, False), (zero, zero, zero, zero), False
    cursor = 0
    for s in range(slots.shape[0]):
        pages = page_table[slots[s]]
        for i in range(plan.shape[0]):
            slot_rank = np.int64(rank[slots[s], layer, plan[i, MODULE] + shifts[s]])
            num_tasks, cost = _shrink_tasks(slot_rank, starts[s + 1] - starts[s], plan[i, IN])
            first, last = share_of(cursor, cost, num_tasks, low, high)
            cursor += num_tasks * cost
            offset = np.int64(off[slots[s], layer, plan[i, MODULE] + shifts[s], 0])
            row_len, padded_len = plan[i, IN], plan[i, A_PADDED]
            r, end = first * RANKS, min(last * RANKS, slot_rank)
            while r < end:
                num_ranks = np.int64(RANKS if r + RANKS <= slot_rank else 1)
                begin = np.int64(0)
                while begin < row_len:
                    places, length = _places_and_length(
                        pool, layer, pages, offset + r * padded_len + begin, padded_len, num_ranks
                    )
                    length = min(length, row_len - begin)
                    following = _ShrinkVisit(
                        np.int64(s), x_address + 4 * begin, planes_address + 4 * (i * module_stride + r),
                        num_ranks, length, begin == 0,
                    )  # fmt: skip
                    if is_known:
                        _shrink_visit(visit, at, places, 4 * x_stride, 4 * row_stride, flat_pool, x_rows, rows, starts)
                    visit, at, is_known = following, places, True
                    begin += length
                r += num_ranks
    if is_known:
        _shrink_visit(visit, at, at, 4 * x_stride, 4 * row_stride, flat_pool, x_rows, rows, starts)
