"""Gains and shifts of adapters on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from loramux.kernels.cpu.instructions.blocks import scale_and_shift
from loramux.kernels.cpu.instructions.compiled import helper, kernel
from loramux.kernels.cpu.instructions.vectors import PANEL, floats_at, widen
from loramux.kernels.cpu.lora.addresses import place
from loramux.kernels.layout import AFFINE, NO_AFFINE

SERIAL_WORK = 30_000
"""Number of elements below which waking other threads costs more than it saves."""


@helper
def apply_affine(
    y: int, y_step: int, rows: Any, begin: int, end: int, pool: Any, gain: int, shift: int, length: int
) -> None:  # fmt: skip
    """Replace `length` columns of the rows `rows[begin:end]` by `y + gain * y + shift`.

    `gain` and `shift` are indices into the flattened pool. `y_step` is the distance between rows, in bytes.
    """
    whole = length - length % PANEL
    for j in range(begin, end):
        address = y + np.int64(rows[j]) * y_step
        scale_and_shift(pool, gain, shift, whole, address)
        row = floats_at(address)
        for e in range(whole, length):
            row[e] += widen(pool[gain + e]) * row[e] + widen(pool[shift + e])


@helper
def _apply_to_segment(
    s: int, y_address: int, y_stride: int, pool: Any, layer: int, module: int, width: int, padded_len: int,
    chunk_len: int, page_table: Any, off: Any, rows: Any, starts: Any, slots: Any,
) -> None:  # fmt: skip
    affine = np.int64(off[slots[s], layer, module, AFFINE])
    if affine == NO_AFFINE:
        return
    flat_pool, pages = pool.reshape(-1), page_table[slots[s]]
    for column in range(0, width, chunk_len):
        gain = place(pool, layer, pages, affine + column)
        shift = place(pool, layer, pages, affine + padded_len + column)
        apply_affine(
            y_address + 4 * column, 4 * y_stride, rows, np.int64(starts[s]), np.int64(starts[s + 1]), flat_pool,
            gain, shift, min(chunk_len, width - column),
        )  # fmt: skip


@kernel
def apply_affines(
    y_address: int,
    y_stride: int,
    pool: Any,
    layer: int,
    module: int,
    width: int,
    padded_len: int,
    chunk_len: int,
    page_table: Any,
    off: Any,
    rows: Any,
    starts: Any,
    slots: Any,
) -> None:
    """`y[t] = y[t] + gain * y[t] + shift` for each row `t` of each segment; see `ReferenceLora.lora_affine`.

    `y` is float32 `[T, width]`, passed by address and row stride in elements. Gain and shift are rows of `padded_len`
    elements in chunks of `chunk_len`. `low_rank.low_rank` describes the other arguments.
    """
    if rows.shape[0] * width < SERIAL_WORK:
        for s in range(slots.shape[0]):
            _apply_to_segment(
                s, y_address, y_stride, pool, layer, module, width, padded_len, chunk_len, page_table, off, rows,
                starts, slots,
            )  # fmt: skip
    else:
        for s in prange(slots.shape[0]):
            _apply_to_segment(
                np.int64(s), y_address, y_stride, pool, layer, module, width, padded_len, chunk_len, page_table, off,
                rows, starts, slots,
            )  # fmt: skip
