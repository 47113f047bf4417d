"""LoRA on the CPU: shrink and expand, read straight from the pages.

Work is cut into tasks whose costs are counted over segments and modules, and each thread takes one contiguous share of
the total, so ragged ranks and segments stay balanced. A task reads a piece of adapter rows once for all rows of its
segment. With one row a segment, which is what decoding is, memory sets the pace: what a thread reads next is fetched
while it computes, across ranks, modules and adapters.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import prange

from loramux.kernels.compiled import exact, helper, kernel
from loramux.kernels.cpu_blocks import (
    add_ranks,
    add_ranks_to_sums,
    dots,
    eight_rows,
    four_rows,
    six_rows,
    three_rows,
)
from loramux.kernels.cpu_vectors import LANES, PANEL, WIDTH, floats_at, widen
from loramux.kernels.layout import MAX_CHUNK, PageGeometry, row_layout
from loramux.kernels.tables import ModuleGroup

MODULE, IN, A_PADDED, OUT, COLUMN, B_PADDED, B_CHUNK = range(7)
"""Columns of a plan: index of the module in the tables, row length and padded length of A, the row length of B and its
first output column, padded length and chunk."""

IS_WIDE = WIDTH == PANEL
"""Whether there are registers for twice as many sums: AVX-512 has 32 of 16 lanes, AVX2 has 16 of 8."""

RANKS = 4
"""Ranks that one pass over the activations serves."""

MAX_RUN = 2048
"""Elements of a rank that are read at once: four such runs stay in the first cache while the rows of a segment pass."""

RANK_BLOCK = 64
"""Ranks whose parts of an output are summed before they are added to it."""

READ_COST = 3
"""What fetching and widening a piece of adapter costs, in rows multiplied with it."""

SERIAL_WORK = 400_000
"""Multiplications below which waking the other threads costs more than it saves."""


class _ShrinkVisit(NamedTuple):
    """A run of one rank, or of RANKS, read once for a segment's rows: int64, of which two are addresses, and a flag."""

    segment: Any
    x: Any
    planes: Any
    num_ranks: Any
    length: Any
    is_first: Any


class _ExpandVisit(NamedTuple):
    """Columns of up to RANK_BLOCK ranks, read once for a segment's rows: int64, two of them addresses; a float32."""

    segment: Any
    planes: Any
    y: Any
    num_ranks: Any
    factor: Any
    length: Any


def group_plan(group: ModuleGroup, geometry: PageGeometry) -> npt.NDArray[np.int64]:
    """What the kernels need to know of a group: int64 `[len(group.modules), 7]`."""
    page_elements = geometry.adapter_elements
    a = row_layout(group.in_features, page_elements)
    plan = []
    for module, out_features, column in zip(group.modules, group.out_features, group.out_offsets, strict=True):
        b = row_layout(out_features, page_elements)
        plan.append((module, a.row_len, a.padded_len, out_features, column, b.padded_len, b.chunk_len))
    return np.array(plan, np.int64)


@helper
def place(pool: Any, layer: int, pages: Any, e: int) -> int:
    """The index in the flat pool `[P, L, E]` of element `e` of the stream that lies in `pages`."""
    page_elements = np.int64(pool.shape[2])
    return (np.int64(pages[e // page_elements]) * pool.shape[1] + layer) * page_elements + e % page_elements


@helper
def _places_and_length(pool: Any, layer: int, pages: Any, e: int, step: int, count: int) -> Any:
    """Where `count` rows of the stream that lies in `pages` go on, and how many elements they may be read at once.

    The first goes on with element `e`, the others lie `step` apart; `count` is RANKS, or 1, whose place is then given
    RANKS times.
    """
    page_elements = np.int64(pool.shape[2])
    length: Any = min(MAX_RUN, page_elements - e % page_elements)
    a = place(pool, layer, pages, e)
    places = (a, a, a, a)
    if count == RANKS:
        e1, e2, e3 = e + step, e + 2 * step, e + 3 * step
        places = (a, place(pool, layer, pages, e1), place(pool, layer, pages, e2), place(pool, layer, pages, e3))
        for following in (e1, e2, e3):
            length = min(length, page_elements - following % page_elements)
    return places, length


@exact
def _shrink_rows(x: Any, planes: Any, pool: Any, a: Any, ahead: Any, length: int, is_first: bool) -> None:
    """`planes[r][c] = x[r] · pool[a[c] : a[c] + length]`, added to what is there unless it `is_first`."""
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
    x: int, x_step: int, planes: int, plane_step: int, rows: Any, begin: int, end: int,
    pool: Any, a: Any, ahead: Any, length: int, is_first: bool,
) -> None:  # fmt: skip
    """All rows of a segment times the same pieces of A's rows."""
    j = begin
    while j < end:
        if IS_WIDE and end - j >= 6:
            x_rows, plane_rows = six_rows(x, x_step, rows, j), six_rows(planes, plane_step, rows, j)
            _shrink_rows(x_rows, plane_rows, pool, a, ahead, length, is_first)
            j += 6
        elif end - j >= 3:
            x_rows, plane_rows = three_rows(x, x_step, rows, j), three_rows(planes, plane_step, rows, j)
            _shrink_rows(x_rows, plane_rows, pool, a, ahead, length, is_first)
            j += 3
        else:
            t = np.int64(rows[j])
            _shrink_rows((x + t * x_step,), (planes + t * plane_step,), pool, a, ahead, length, is_first)
            j += 1


@helper
def _shrink_visit(
    visit: Any, a: Any, ahead: Any, x_step: int, plane_step: int, pool: Any, rows: Any, starts: Any
) -> None:  # fmt: skip
    """`ahead` is where the next visit begins."""
    begin, end = np.int64(starts[visit.segment]), np.int64(starts[visit.segment + 1])
    if visit.num_ranks == RANKS:
        _shrink_segment(
            visit.x, x_step, visit.planes, plane_step, rows, begin, end, pool, a, ahead, visit.length, visit.is_first
        )
    else:
        _shrink_segment(
            visit.x, x_step, visit.planes, plane_step, rows, begin, end, pool, (a[0],), (ahead[0],), visit.length,
            visit.is_first,
        )  # fmt: skip


@helper
def _expand_row(
    v: int, y: int, pool: Any, places: Any, ahead: Any, num_ranks: int, factor: Any, length: int, sums: Any
) -> None:  # fmt: skip
    """Add `num_ranks` ranks' parts to `length` columns of one row, `length` a multiple of 16.

    `sums` is room for them: a rank's row is read from end to end, as memory likes it. Each sum has the order that
    `add_ranks` gives it. `ahead` are the ranks that come next.
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
    """Add `num_ranks` ranks' parts to `length` columns of all rows of a segment."""
    whole = length - length % PANEL
    j = begin
    while j < end:
        if IS_WIDE and end - j >= 8:
            v, o = eight_rows(planes, plane_step, rows, j), eight_rows(y, y_step, rows, j)
            for e in range(0, whole, PANEL):
                add_ranks(v, pool, places, e, num_ranks, factor, o)
            taken = 8
        elif end - j >= 4:
            v, o = four_rows(planes, plane_step, rows, j), four_rows(y, y_step, rows, j)
            for e in range(0, whole, PANEL):
                add_ranks(v, pool, places, e, num_ranks, factor, o)
            taken = 4
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
    """`ahead` is where the next visit begins."""
    begin, end = np.int64(starts[visit.segment]), np.int64(starts[visit.segment + 1])
    _expand_segment(
        visit.planes, 4 * row_stride, visit.y, 4 * y_stride, rows, begin, end,
        pool, places, ahead, visit.num_ranks, visit.factor, visit.length, sums,
    )  # fmt: skip


@helper
def _share(cursor: int, cost: int, count: int, low: int, high: int) -> Any:
    """Which of `count` tasks of `cost` each, laid out from `cursor` on, begin in `[low, high)`: `[first, last)`."""
    first = min(count, max(0, (low - cursor + cost - 1) // cost))
    last = min(count, max(0, (high - cursor + cost - 1) // cost))
    return first, last


@helper
def _shrink_tasks(slot_rank: int, num_rows: int) -> Any:
    """Number and cost of a segment's tasks in one module: one for each 4 ranks."""
    return (slot_rank + RANKS - 1) // RANKS, num_rows + READ_COST


@helper
def _shrink_work(plan: Any, layer: int, rank: Any, starts: Any, slots: Any) -> int:
    work = 0
    for s in range(slots.shape[0]):
        for i in range(plan.shape[0]):
            slot_rank = np.int64(rank[slots[s], layer, plan[i, MODULE]])
            count, cost = _shrink_tasks(slot_rank, starts[s + 1] - starts[s])
            work += count * cost
    return work


@helper
def _shrink_share(
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
    rows: Any,
    starts: Any,
    slots: Any,
) -> None:
    flat_pool = pool.reshape(-1)
    # A visit runs once the next one is known, so that it can fetch it.
    zero: Any = np.int64(0)
    visit, at, is_known = _ShrinkVisit(zero, zero, zero, zero, zero, False), (zero, zero, zero, zero), False
    cursor = 0
    for s in range(slots.shape[0]):
        pages = page_table[slots[s]]
        for i in range(plan.shape[0]):
            slot_rank = np.int64(rank[slots[s], layer, plan[i, MODULE]])
            num_tasks, cost = _shrink_tasks(slot_rank, starts[s + 1] - starts[s])
            first, last = _share(cursor, cost, num_tasks, low, high)
            cursor += num_tasks * cost
            offset = np.int64(off[slots[s], layer, plan[i, MODULE], 0])
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
                        _shrink_visit(visit, at, places, 4 * x_stride, 4 * row_stride, flat_pool, rows, starts)
                    visit, at, is_known = following, places, True
                    begin += length
                r += num_ranks
    if is_known:
        _shrink_visit(visit, at, at, 4 * x_stride, 4 * row_stride, flat_pool, rows, starts)


@kernel
def shrink(
    num_threads: int,
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
    rows: Any,
    starts: Any,
    slots: Any,
) -> None:
    """`planes[t, i, :rank] = x[t] @ A[slot, module i]ᵀ`; see `ReferenceKernels.lora_shrink`.

    The work is cut into `num_threads` equal shares. `x` and `planes` are float32 by address and strides in elements;
    `pool` is `[P, L, E]`, float32 or the bits of bfloat16 as uint16; `plan` is `group_plan`'s; tables and segments have
    the dtypes of `tables.py`.
    """
    work = _shrink_work(plan, layer, rank, starts, slots)
    if work * RANKS * plan[0, IN] < SERIAL_WORK:
        _shrink_share(
            0, work, x_address, x_stride, planes_address, row_stride, module_stride,
            pool, layer, plan, page_table, off, rank, rows, starts, slots,
        )  # fmt: skip
    else:
        for part in prange(num_threads):
            _shrink_share(
                work * part // num_threads, work * (part + 1) // num_threads,
                x_address, x_stride, planes_address, row_stride, module_stride,
                pool, layer, plan, page_table, off, rank, rows, starts, slots,
            )  # fmt: skip


@helper
def _expand_tasks(slot_rank: int, num_rows: int, out_features: int, chunk_len: int) -> Any:
    """Number and cost of a segment's tasks in one module: one for each chunk of columns."""
    return (out_features + chunk_len - 1) // chunk_len, chunk_len * slot_rank * (num_rows + READ_COST)


@helper
def _expand_work(plan: Any, layer: int, rank: Any, starts: Any, slots: Any) -> int:
    work = 0
    for s in range(slots.shape[0]):
        for i in range(plan.shape[0]):
            slot_rank = np.int64(rank[slots[s], layer, plan[i, MODULE]])
            count, cost = _expand_tasks(slot_rank, starts[s + 1] - starts[s], plan[i, OUT], plan[i, B_CHUNK])
            work += count * cost
    return work


@helper
def _expand_share(
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
) -> None:
    flat_pool = pool.reshape(-1)
    sums = np.empty(MAX_CHUNK, np.float32)
    # A visit runs once the next one is known, so that it can fetch it.
    places, following = np.empty(RANK_BLOCK, np.int64), np.empty(RANK_BLOCK, np.int64)
    zero: Any = np.int64(0)
    visit, is_known = _ExpandVisit(zero, zero, zero, zero, np.float32(0), zero), False
    cursor = 0
    for s in range(slots.shape[0]):
        pages = page_table[slots[s]]
        for i in range(plan.shape[0]):
            slot_rank = np.int64(rank[slots[s], layer, plan[i, MODULE]])
            if slot_rank == 0:
                continue
            width, padded_len, chunk_len = plan[i, OUT], plan[i, B_PADDED], plan[i, B_CHUNK]
            count, cost = _expand_tasks(slot_rank, starts[s + 1] - starts[s], width, chunk_len)
            first, last = _share(cursor, cost, count, low, high)
            cursor += count * cost
            offset = np.int64(off[slots[s], layer, plan[i, MODULE], 1])
            for begin in range(first * chunk_len, min(last * chunk_len, width), chunk_len):
                for r in range(0, slot_rank, RANK_BLOCK):
                    num_ranks = min(np.int64(RANK_BLOCK), slot_rank - r)
                    for k in range(num_ranks):
                        following[k] = place(pool, layer, pages, offset + (r + k) * padded_len + begin)
                    for k in range(num_ranks, RANKS):
                        following[k] = following[0]
                    if is_known:
                        _expand_visit(visit, places, following, row_stride, y_stride, flat_pool, rows, starts, sums)
                    places, following, is_known = following, places, True
                    visit = _ExpandVisit(
                        np.int64(s), planes_address + 4 * (i * module_stride + r),
                        y_address + 4 * (plan[i, COLUMN] + begin), num_ranks,
                        scale[slots[s], layer, plan[i, MODULE]], min(chunk_len, width - begin),
                    )  # fmt: skip
    if is_known:
        _expand_visit(visit, places, places, row_stride, y_stride, flat_pool, rows, starts, sums)


@kernel
def expand(
    num_threads: int,
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
) -> None:
    """`y[t, columns of i] += scale * planes[t, i, :rank] @ B[slot, module i]ᵀ`; see `ReferenceKernels.lora_expand`.

    The arguments are as in `shrink`; `y` is float32 by address and row stride.
    """
    work = _expand_work(plan, layer, rank, starts, slots)
    if work < SERIAL_WORK:
        _expand_share(
            0, work, planes_address, row_stride, module_stride, y_address, y_stride,
            pool, layer, plan, page_table, off, rank, scale, rows, starts, slots,
        )  # fmt: skip
    else:
        for part in prange(num_threads):
            _expand_share(
                work * part // num_threads, work * (part + 1) // num_threads,
                planes_address, row_stride, module_stride, y_address, y_stride,
                pool, layer, plan, page_table, off, rank, scale, rows, starts, slots,
            )  # fmt: skip
