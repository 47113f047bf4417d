"""LoRA on the CPU: shrink and expand, read straight from the pages.

Work is cut into tasks whose costs are counted over segments and modules, and each thread takes one contiguous share of
the total, so ragged ranks and segments stay balanced. A task reads a piece of adapter rows once for all rows of its
segment.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import prange

from loramux.kernels.compiled import helper, kernel
from loramux.kernels.cpu_vectors import LANES, floats_at, load, multiply_add, store, total, widen, zeros
from loramux.kernels.layout import PageGeometry, row_layout
from loramux.kernels.tables import ModuleGroup

MODULE, IN, A_PADDED, A_CHUNK, OUT, COLUMN, B_PADDED, B_CHUNK = range(8)
"""Columns of a plan: index of the module in the tables, row length, padded length and chunk of A, the same of B, and
the first output column."""

RANKS = 4
"""Ranks that one pass over the activations serves."""

READ_COST = 3
"""What fetching and widening a piece of adapter costs, in rows multiplied with it."""

SERIAL_WORK = 400_000
"""Multiplications below which waking the other threads costs more than it saves."""


def group_plan(group: ModuleGroup, geometry: PageGeometry) -> npt.NDArray[np.int64]:
    """What the kernels need to know of a group: int64 `[len(group.modules), 8]`."""
    page_elements = geometry.adapter_elements
    a = row_layout(group.in_features, page_elements)
    plan = []
    for module, out_features, column in zip(group.modules, group.out_features, group.out_offsets, strict=True):
        b = row_layout(out_features, page_elements)
        plan.append((module, a.row_len, a.padded_len, a.chunk_len, out_features, column, b.padded_len, b.chunk_len))
    return np.array(plan, np.int64)


@helper
def _dot(x: Any, i: int, pool: Any, a: int, length: int) -> Any:
    whole = length - length % LANES
    lanes = zeros()
    for e in range(0, whole, LANES):
        lanes = multiply_add(load(x, i + e), load(pool, a + e), lanes)
    rest = np.float32(0)
    for e in range(whole, length):
        rest += x[i + e] * widen(pool[a + e])
    return total(lanes) + rest


@helper
def _dot_4_ranks(x: Any, i: int, pool: Any, a: Any, length: int) -> Any:
    a0, a1, a2, a3 = a
    whole = length - length % LANES
    sum0, sum1, sum2, sum3 = zeros(), zeros(), zeros(), zeros()
    for e in range(0, whole, LANES):
        lanes = load(x, i + e)
        sum0 = multiply_add(lanes, load(pool, a0 + e), sum0)
        sum1 = multiply_add(lanes, load(pool, a1 + e), sum1)
        sum2 = multiply_add(lanes, load(pool, a2 + e), sum2)
        sum3 = multiply_add(lanes, load(pool, a3 + e), sum3)
    rest0, rest1, rest2, rest3 = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for e in range(whole, length):
        rest0 += x[i + e] * widen(pool[a0 + e])
        rest1 += x[i + e] * widen(pool[a1 + e])
        rest2 += x[i + e] * widen(pool[a2 + e])
        rest3 += x[i + e] * widen(pool[a3 + e])
    return total(sum0) + rest0, total(sum1) + rest1, total(sum2) + rest2, total(sum3) + rest3


@helper
def _add(y: Any, i: int, v: Any, pool: Any, b: int, length: int) -> None:
    whole = length - length % LANES
    for e in range(0, whole, LANES):
        store(y, i + e, multiply_add(v, load(pool, b + e), load(y, i + e)))
    for e in range(whole, length):
        y[i + e] += v * widen(pool[b + e])


@helper
def _add_4_ranks(y: Any, i: int, v0: Any, v1: Any, v2: Any, v3: Any, pool: Any, b: Any, length: int) -> None:
    b0, b1, b2, b3 = b
    whole = length - length % LANES
    for e in range(0, whole, LANES):
        lanes = multiply_add(v0, load(pool, b0 + e), load(y, i + e))
        lanes = multiply_add(v1, load(pool, b1 + e), lanes)
        lanes = multiply_add(v2, load(pool, b2 + e), lanes)
        store(y, i + e, multiply_add(v3, load(pool, b3 + e), lanes))
    for e in range(whole, length):
        even = v0 * widen(pool[b0 + e]) + v2 * widen(pool[b2 + e])
        odd = v1 * widen(pool[b1 + e]) + v3 * widen(pool[b3 + e])
        y[i + e] += even + odd


@helper
def place(pool: Any, layer: int, pages: Any, e: int) -> int:
    """The index in the flat pool `[P, L, E]` of element `e` of the stream that lies in `pages`."""
    page_elements = np.int64(pool.shape[2])
    return (np.int64(pages[e // page_elements]) * pool.shape[1] + layer) * page_elements + e % page_elements


@helper
def _4_places(pool: Any, layer: int, pages: Any, e: int, padded_len: int) -> Any:
    """The places of the same piece of four successive rows."""
    return (
        place(pool, layer, pages, e),
        place(pool, layer, pages, e + padded_len),
        place(pool, layer, pages, e + 2 * padded_len),
        place(pool, layer, pages, e + 3 * padded_len),
    )


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
    x, planes, flat_pool = floats_at(x_address), floats_at(planes_address), pool.reshape(-1)
    cursor = 0
    for s in range(slots.shape[0]):
        pages = page_table[slots[s]]
        for i in range(plan.shape[0]):
            slot_rank = np.int64(rank[slots[s], layer, plan[i, MODULE]])
            count, cost = _shrink_tasks(slot_rank, starts[s + 1] - starts[s])
            first, last = _share(cursor, cost, count, low, high)
            cursor += count * cost
            offset = np.int64(off[slots[s], layer, plan[i, MODULE], 0])
            row_len, padded_len, chunk_len = plan[i, IN], plan[i, A_PADDED], plan[i, A_CHUNK]
            for r in range(first * RANKS, min(last * RANKS, slot_rank), RANKS):
                for begin in range(0, row_len, chunk_len):
                    length = min(chunk_len, row_len - begin)
                    e = offset + r * padded_len + begin
                    if r + RANKS <= slot_rank:
                        a = _4_places(pool, layer, pages, e, padded_len)
                        for j in range(starts[s], starts[s + 1]):
                            t = np.int64(rows[j])
                            v0, v1, v2, v3 = _dot_4_ranks(x, t * x_stride + begin, flat_pool, a, length)
                            p = t * row_stride + i * module_stride + r
                            if begin > 0:
                                v0, v1 = v0 + planes[p], v1 + planes[p + 1]
                                v2, v3 = v2 + planes[p + 2], v3 + planes[p + 3]
                            planes[p], planes[p + 1], planes[p + 2], planes[p + 3] = v0, v1, v2, v3
                    else:
                        for k in range(slot_rank - r):
                            a_k = place(pool, layer, pages, e + k * padded_len)
                            for j in range(starts[s], starts[s + 1]):
                                t = np.int64(rows[j])
                                v = _dot(x, t * x_stride + begin, flat_pool, a_k, length)
                                p = t * row_stride + i * module_stride + r + k
                                planes[p] = v + planes[p] if begin > 0 else v


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
    y, planes, flat_pool = floats_at(y_address), floats_at(planes_address), pool.reshape(-1)
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
            factor = scale[slots[s], layer, plan[i, MODULE]]
            whole_ranks = slot_rank - slot_rank % RANKS
            for begin in range(first * chunk_len, min(last * chunk_len, width), chunk_len):
                length = min(chunk_len, width - begin)
                for r in range(0, whole_ranks, RANKS):
                    b = _4_places(pool, layer, pages, offset + r * padded_len + begin, padded_len)
                    for j in range(starts[s], starts[s + 1]):
                        t = np.int64(rows[j])
                        p = t * row_stride + i * module_stride + r
                        v0, v1 = factor * planes[p], factor * planes[p + 1]
                        v2, v3 = factor * planes[p + 2], factor * planes[p + 3]
                        _add_4_ranks(y, t * y_stride + plan[i, COLUMN] + begin, v0, v1, v2, v3, flat_pool, b, length)
                for r in range(whole_ranks, slot_rank):
                    b_r = place(pool, layer, pages, offset + r * padded_len + begin)
                    for j in range(starts[s], starts[s + 1]):
                        t = np.int64(rows[j])
                        v = factor * planes[t * row_stride + i * module_stride + r]
                        _add(y, t * y_stride + plan[i, COLUMN] + begin, v, flat_pool, b_r, length)


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
