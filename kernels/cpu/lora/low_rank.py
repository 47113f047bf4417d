"""LoRA on the CPU in one call: shrink, expand, or both.

Each call costs about 20 µs for Python code and waking threads, as much as reading half a megabyte. Decode therefore
adds LoRA to a linear layer in one call, and in one parallel region if each thread can process whole segments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from loramux.kernels.cpu.instructions.compiled import helper, kernel
from loramux.kernels.cpu.lora.expand import expand_share, expand_work
from loramux.kernels.cpu.lora.shrink import shrink_share, shrink_work

SERIAL_WORK = 400_000
"""Number of multiplications below which waking other threads costs more than it saves."""

MAX_EXCESS = 1 / 32
"""Fraction by which a thread's work may exceed an equal share. Beyond this, a barrier after the shrink is faster."""


SHRINK, EXPAND, BOTH = range(3)
"""Rows of the cumulative work."""

FIRST, END, SHRINK_BEGIN, SHRINK_END, EXPAND_BEGIN, EXPAND_END = range(6)
"""Columns of a share: its segments `[FIRST, END)`, and the parts of their work that it does, in multiplications."""


@helper
def _segment_work(
    shrinks: bool, expands: bool, plan: Any, layer: int, rank: Any, starts: Any, slots: Any, shifts: Any
) -> Any:  # fmt: skip
    """Cumulative number of multiplications before each segment, then the total, int64 `[3, num_segments + 1]`."""
    work = np.zeros((3, slots.shape[0] + 1), np.int64)
    for s in range(slots.shape[0]):
        own_starts, own_slots, own_shifts = starts[s : s + 2], slots[s : s + 1], shifts[s : s + 1]
        work[SHRINK, s + 1] = work[SHRINK, s]
        work[EXPAND, s + 1] = work[EXPAND, s]
        if shrinks:
            work[SHRINK, s + 1] += shrink_work(plan, layer, rank, own_starts, own_slots, own_shifts)
        if expands:
            work[EXPAND, s + 1] += expand_work(plan, layer, rank, own_starts, own_slots, own_shifts)
        work[BOTH, s + 1] = work[SHRINK, s + 1] + work[EXPAND, s + 1]
    return work


@helper
def _whole_segments(work: Any, num_parts: int) -> Any:
    """The first segment of each of `num_parts` shares, then the number of segments, int64 `[num_parts + 1]`.

    `work` is cumulative, int64 `[num_segments + 1]`. A segment belongs to the share that contains its midpoint.
    """
    firsts = np.full(num_parts + 1, work.shape[0] - 1, np.int64)
    s = 0
    for part in range(num_parts):
        while s < work.shape[0] - 1 and (work[s] + work[s + 1]) * num_parts < 2 * work[-1] * part:
            s += 1
        firsts[part] = s
    return firsts


@helper
def _is_even(work: Any, firsts: Any) -> bool:
    """True if no share exceeds an equal share by more than MAX_EXCESS."""
    num_parts = firsts.shape[0] - 1
    most = np.int64(0)
    for part in range(num_parts):
        most = max(most, work[firsts[part + 1]] - work[firsts[part]])
    return most * num_parts <= work[-1] * (1 + MAX_EXCESS)


@helper
def _shares(work: Any, num_threads: int, shrinks: bool, expands: bool) -> Any:
    """The shares of each phase, int64 `[num_phases, num_shares, 6]`. `work` comes from `_segment_work`.

    A phase begins when the previous one has ended. There are two, for shrink and expand, only if each thread cannot
    process whole segments. There is one share if there is little work.
    """
    num_segments = np.int64(work.shape[1] - 1)
    firsts = _whole_segments(work[BOTH], num_threads)
    takes_whole = shrinks and expands and _is_even(work[BOTH], firsts)
    num_phases = 2 if shrinks and expands and not takes_whole else 1
    if work[BOTH, -1] < num_phases * SERIAL_WORK:
        takes_whole, firsts = True, firsts[-2:].copy()
        firsts[0] = 0
    if takes_whole:
        whole = np.zeros((1, firsts.shape[0] - 1, 6), np.int64)
        for part in range(whole.shape[1]):
            first, end = firsts[part], firsts[part + 1]
            whole[0, part, FIRST], whole[0, part, END] = first, end
            whole[0, part, SHRINK_END] = work[SHRINK, end] - work[SHRINK, first]
            whole[0, part, EXPAND_END] = work[EXPAND, end] - work[EXPAND, first]
        return whole
    shares = np.zeros((num_phases, num_threads, 6), np.int64)
    for phase in range(num_phases):
        kind, column = (SHRINK, SHRINK_BEGIN) if shrinks and phase == 0 else (EXPAND, EXPAND_BEGIN)
        for part in range(num_threads):
            shares[phase, part, END] = num_segments
            shares[phase, part, column] = work[kind, -1] * part // num_threads
            shares[phase, part, column + 1] = work[kind, -1] * (part + 1) // num_threads
    return shares


@helper
def _run_share(
    share: Any,
    x_address: int, x_stride: int, planes_address: int, row_stride: int, module_stride: int, y_address: int,
    y_stride: int, pool: Any, layer: int, plan: Any, page_table: Any, off: Any, rank: Any, scale: Any, x_rows: Any,
    rows: Any, starts: Any, slots: Any, shifts: Any,
) -> None:  # fmt: skip
    """Shrink, then expand, as a row of `_shares` says."""
    first, end = share[FIRST], share[END]
    own_starts, own_slots, own_shifts = starts[first : end + 1], slots[first:end], shifts[first:end]
    if share[SHRINK_END] > share[SHRINK_BEGIN]:
        shrink_share(
            share[SHRINK_BEGIN], share[SHRINK_END], x_address, x_stride, planes_address, row_stride, module_stride,
            pool, layer, plan, page_table, off, rank, x_rows, rows, own_starts, own_slots, own_shifts,
        )  # fmt: skip
    if share[EXPAND_END] > share[EXPAND_BEGIN]:
        expand_share(
            share[EXPAND_BEGIN], share[EXPAND_END], planes_address, row_stride, module_stride, y_address, y_stride,
            pool, layer, plan, page_table, off, rank, scale, rows, own_starts, own_slots, own_shifts,
        )  # fmt: skip


@kernel
def low_rank(
    num_threads: int,
    shrinks: bool,
    expands: bool,
    x_address: int,
    x_stride: int,
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
    x_rows: Any,
    rows: Any,
    starts: Any,
    slots: Any,
    shifts: Any,
) -> None:
    """`planes[t, i, :rank] = x[t] @ A[slot, module i]ᵀ`, then `y[t, columns of i] += scale * planes[t, i, :rank] @ Bᵀ`.

    If the adapter has affines, the sum is then replaced by `y + gain * y + shift`.

    The first product is computed only if `shrinks` is true, and the second only if `expands` is true. See
    `ReferenceKernels`. Unless there is little work, it is divided into `num_threads` shares. `x`, `planes` and `y` are
    float32, passed by address and strides in elements. `pool` is `[P, L, E]`: float32, bfloat16 bits as uint16, or FP8
    codes as uint8. `plan` comes from `group_plan`. Tables and segments have the dtypes given in `tables.py`. `x_rows`,
    int32 `[num_lora_rows]`, contains the row of `x` for each element of `rows`. `shifts`, int32 `[num_segments]`, is
    added to the module indices of the plan for the segment.
    """
    work = _segment_work(shrinks, expands, plan, layer, rank, starts, slots, shifts)
    shares = _shares(work, num_threads, shrinks, expands)
    # Each place that calls `_run_share` takes seconds to compile.
    if shares.shape[0] == 1 and shares.shape[1] == 1:
        _run_share(
            shares[0, 0], x_address, x_stride, planes_address, row_stride, module_stride, y_address, y_stride, pool,
            layer, plan, page_table, off, rank, scale, x_rows, rows, starts, slots, shifts,
        )  # fmt: skip
    else:
        for phase in range(shares.shape[0]):
            for part in prange(shares.shape[1]):
                _run_share(
                    shares[phase, part], x_address, x_stride, planes_address, row_stride, module_stride, y_address,
                    y_stride, pool, layer, plan, page_table, off, rank, scale, x_rows, rows, starts, slots, shifts,
                )  # fmt: skip
