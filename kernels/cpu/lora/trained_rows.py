"""CPU kernels for the rows of the embedding and the head that an adapter replaces."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from loramux.kernels.cpu.instructions.compiled import helper, kernel
from loramux.kernels.cpu.instructions.vectors import floats_at
from loramux.kernels.cpu.lora.addresses import place

SERIAL_COPIES = 100_000
"""Number of elements to copy below which waking other threads costs more than it saves."""


@helper
def _row_of(token: int, ids: Any, pages: Any, first_id: int, num_rows: int, vocab_size: int) -> Any:
    """Index of the adapter's row for a token, or -1 if the adapter does not replace the token's row."""
    if num_rows >= vocab_size:
        return token
    flat_ids = ids.reshape(-1)
    low, high = np.int64(0), np.int64(num_rows)
    while low < high:
        middle = (low + high) // 2
        if np.int64(flat_ids[place(ids, 0, pages, first_id + middle)]) < token:
            low = middle + 1
        else:
            high = middle
    is_found = low < num_rows and np.int64(flat_ids[place(ids, 0, pages, first_id + low)]) == token
    return low if is_found else np.int64(-1)


@helper
def _copy_rows(
    s: int, tokens: Any, y: Any, pool: Any, ids: Any, vocab_size: int, padded_len: int, module: int, page_table: Any,
    off: Any, num_rows: Any, rows: Any, starts: Any, slots: Any,
) -> None:  # fmt: skip
    """Copy the replaced rows of one segment's tokens."""
    flat_pool, pages = pool.reshape(-1), page_table[slots[s]]
    count = np.int64(num_rows[slots[s], 0, module])
    begin, first_id = np.int64(off[slots[s], 0, module, 0]), np.int64(off[slots[s], 0, module, 1])
    for j in range(starts[s], starts[s + 1]):
        t = np.int64(rows[j])
        row = _row_of(np.int64(tokens[t]), ids, pages, first_id, count, vocab_size) if count else np.int64(-1)
        if row >= 0:
            e, column = begin + row * padded_len, np.int64(0)
            while column < y.shape[1]:
                at, length = place(pool, 0, pages, e), min(y.shape[1] - column, pool.shape[2] - e % pool.shape[2])
                for i in range(length):
                    y[t, column + i] = flat_pool[at + i]
                e, column = e + length, column + length


@kernel
def replace_rows(
    tokens: Any,
    y: Any,
    pool: Any,
    ids: Any,
    vocab_size: int,
    padded_len: int,
    module: int,
    page_table: Any,
    off: Any,
    num_rows: Any,
    rows: Any,
    starts: Any,
    slots: Any,
) -> None:
    """`y[t] = row of tokens[t]` where the adapter replaces the row; see `ReferenceLora.replace_rows`.

    `tokens` is int32 `[T]`, and `y` is `[T, row_len]` in the dtype of `pool` `[P, 1, E]`: float32, or bfloat16 bits as
    uint16. Adapters stored as FP8 codes have no trained rows. `ids` is the same memory as int32. Rows are `padded_len`
    elements apart.
    """
    if rows.shape[0] * y.shape[1] < SERIAL_COPIES:
        for s in range(slots.shape[0]):
            _copy_rows(
                s, tokens, y, pool, ids, vocab_size, padded_len, module, page_table, off, num_rows, rows, starts, slots
            )
    else:
        for s in prange(slots.shape[0]):
            _copy_rows(
                np.int64(s), tokens, y, pool, ids, vocab_size, padded_len, module, page_table, off, num_rows, rows,
                starts, slots,
            )  # fmt: skip


@helper
def _store_row(
    j: int, planes_address: int, row_stride: int, y_address: int, y_stride: int, ids: Any, vocab_size: int,
    module: int, page_table: Any, off: Any, num_rows: Any, rows: Any, starts: Any, slots: Any,
) -> None:  # fmt: skip
    """Store the logits that the trained rows produce for token row `rows[j]`."""
    planes, logits, flat_ids = floats_at(planes_address), floats_at(y_address), ids.reshape(-1)
    slot, t = slots[np.searchsorted(starts, j, side="right") - 1], np.int64(rows[j])
    pages = page_table[slot]
    count, first_id = np.int64(num_rows[slot, 0, module]), np.int64(off[slot, 0, module, 1])
    if count >= vocab_size:
        for r in range(count):
            logits[t * y_stride + r] = planes[t * row_stride + r]
    else:
        for r in range(count):
            column = np.int64(flat_ids[place(ids, 0, pages, first_id + r)])
            logits[t * y_stride + column] = planes[t * row_stride + r]


@kernel
def store_columns(
    planes_address: int,
    row_stride: int,
    y_address: int,
    y_stride: int,
    ids: Any,
    vocab_size: int,
    module: int,
    page_table: Any,
    off: Any,
    num_rows: Any,
    rows: Any,
    starts: Any,
    slots: Any,
) -> None:
    """`y[t, ids[r]] = planes[t, r]` for each row `t` of each segment and each trained row `r` of its adapter.

    `planes` and `y` are float32, passed by address and row stride in elements. `replace_rows` describes the other
    arguments. No adapter replaces more than `row_stride` rows.
    """
    if rows.shape[0] * row_stride < SERIAL_COPIES:
        for j in range(rows.shape[0]):
            _store_row(
                j, planes_address, row_stride, y_address, y_stride, ids, vocab_size, module, page_table, off, num_rows,
                rows, starts, slots,
            )  # fmt: skip
    else:
        for j in prange(rows.shape[0]):
            _store_row(
                np.int64(j), planes_address, row_stride, y_address, y_stride, ids, vocab_size, module, page_table, off,
                num_rows, rows, starts, slots,
            )  # fmt: skip
