"""GPU kernels for the rows of the embedding and the head that an adapter replaces."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux.kernels.gpu.addresses import dot_dtype, read_a
from loramux.kernels.gpu.launches import TARGET_PROGRAMS, TILE_ROWS, power_of_two_within
from loramux.kernels.layout import row_layout
from loramux.kernels.tables import LoraCall, PoolViews

MAX_BLOCK = 1024
"""Maximum number of elements that a program of `replace_rows` copies for each of its rows."""

BLOCK_ROWS = 32
"""Number of the head's rows that a program of `replace_columns` multiplies at a time."""

BLOCK_COLUMNS = 128
"""Maximum number of elements of each row that a program of `replace_columns` multiplies at a time."""


@triton.jit
def load_ids(
    ids: tl.tensor, pages: tl.tensor, first_id: tl.tensor, indices: tl.tensor, is_read: tl.tensor, W: tl.constexpr
) -> tl.tensor:
    """The ids at `indices` in the list that begins at `first_id` in `pages`. A page has `W` units of four bytes."""
    place = first_id + indices
    page = tl.load(pages + place // W, mask=is_read, other=0).to(tl.int64)
    return tl.load(ids + page * W + place % W, mask=is_read, other=0)


@triton.jit
def replace_rows_kernel(
    tokens: tl.tensor,
    y: tl.tensor,
    pool: tl.tensor,
    ids: tl.tensor,
    page_table: tl.tensor,
    off: tl.tensor,
    num_rows_table: tl.tensor,
    segment_rows: tl.tensor,
    segment_starts: tl.tensor,
    segment_slots: tl.tensor,
    MODULE: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    VOCAB: tl.constexpr,
    ROW_LEN: tl.constexpr,
    PADDED: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program handles one segment and columns `[block * BLOCK, (block + 1) * BLOCK)`."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    segment = tl.program_id(1)
    slot = tl.load(segment_slots + segment).to(tl.int64)
    if slot < 0:
        return
    entry = slot * M + MODULE
    num_rows = tl.load(num_rows_table + entry)
    if num_rows == 0:
        return
    begin = tl.load(off + entry * PARTS).to(tl.int64)
    first_id = tl.load(off + entry * PARTS + 1)
    first = tl.load(segment_starts + segment)
    end = tl.load(segment_starts + segment + 1)
    pages = page_table + slot * MAX_PAGES
    while first < end:
        listed = first + tl.arange(0, ROWS)
        is_row = listed < end
        t = tl.load(segment_rows + listed, mask=is_row, other=0).to(tl.int64)
        token = tl.load(tokens + t, mask=is_row, other=0).to(tl.int32)
        row = token
        is_found = is_row
        if num_rows < VOCAB:
            low = tl.zeros_like(token)
            high = low + num_rows
            # Search for the first id that is not below the token. Each step halves the range.
            for _ in tl.static_range(STEPS):
                middle = (low + high) // 2
                is_open = low < high
                is_below = load_ids(ids, pages, first_id, middle, is_open, W) < token
                low = tl.where(is_open & is_below, middle + 1, low)
                high = tl.where(is_open & (is_below == 0), middle, high)
            is_found = is_row & (low < num_rows)
            is_found = is_found & (load_ids(ids, pages, first_id, low, is_found, W) == token)
            row = low
        is_copied = is_found[:, None] & (column < ROW_LEN)[None, :]
        e = begin + row.to(tl.int64)[:, None] * PADDED + column[None, :]
        page = tl.load(pages + e // E, mask=is_copied, other=0).to(tl.int64)
        values = tl.load(pool + page * E + e % E, mask=is_copied, other=0.0)
        tl.store(y + t[:, None] * ROW_LEN + column[None, :], values, mask=is_copied)
        first += ROWS


# Logits of classes have as many columns as the adapter has classes, but there is no time to compile for each number.
@triton.jit(do_not_specialize=["y_stride"])
def replace_columns_kernel(
    x: tl.tensor,
    y: tl.tensor,
    pool: tl.tensor,
    ids: tl.tensor,
    page_table: tl.tensor,
    off: tl.tensor,
    num_rows_table: tl.tensor,
    segment_rows: tl.tensor,
    segment_starts: tl.tensor,
    segment_slots: tl.tensor,
    x_stride: tl.tensor,
    y_stride: tl.tensor,
    MODULE: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    MAX_PAGES: tl.constexpr,
    E: tl.constexpr,
    W: tl.constexpr,
    VOCAB: tl.constexpr,
    IN: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
) -> None:
    """One program handles one segment and every `tl.num_programs(0)`-th block of BLOCK_N trained rows."""
    segment = tl.program_id(1)
    slot = tl.load(segment_slots + segment).to(tl.int64)
    if slot < 0:
        return
    entry = slot * M + MODULE
    num_rows = tl.load(num_rows_table + entry)
    begin = tl.load(off + entry * PARTS)
    first_id = tl.load(off + entry * PARTS + 1)
    end = tl.load(segment_starts + segment + 1)
    pages = page_table + slot * MAX_PAGES
    within = tl.arange(0, BLOCK_K)
    block = tl.program_id(0) * BLOCK_N
    while block < num_rows:
        row = block + tl.arange(0, BLOCK_N)
        column = row
        if num_rows < VOCAB:
            column = load_ids(ids, pages, first_id, row, row < num_rows, W)
        # Multiply all rows of the segment by this block before the next one, while its weights are in a cache.
        first = tl.load(segment_starts + segment)
        while first < end:
            listed = first + tl.arange(0, ROWS)
            is_row = listed < end
            t = tl.load(segment_rows + listed, mask=is_row, other=0).to(tl.int64)
            logits = tl.zeros((ROWS, BLOCK_N), tl.float32)
            for k in tl.range(0, IN, BLOCK_K):
                weights = read_a(pool, pages, begin, 0, row, num_rows, k, IN, PADDED, 1, E, BLOCK_K)
                values = tl.load(
                    x + t[:, None] * x_stride + (k + within)[None, :],
                    mask=is_row[:, None] & (k + within < IN)[None, :],
                    other=0.0,
                )
                logits = tl.dot(values.to(DOT_DTYPE), tl.trans(weights.to(DOT_DTYPE)), logits, input_precision="tf32x3")
            at = y + t[:, None] * y_stride + column[None, :]
            tl.store(at, logits.to(y.dtype.element_ty), mask=is_row[:, None] & (row < num_rows)[None, :])
            first += ROWS
        block += tl.num_programs(0) * BLOCK_N


def replace_rows(pool: PoolViews, tokens: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
    """`y[t] = row of tokens[t]` for each row `t` of each segment whose adapter replaces the token's row.

    - `pool` contains flat pages; `layout.py` describes how trained rows are stored.
    - `tokens` int32 or int64 `[T]`, contiguous; rows listed by a segment have tokens of the adapter's vocabulary.
    - `call` as for `lora_gather`, but with the tables `AdapterTables.trained_rows`.
    - `y` `[T, hidden_size]` in the dtype of `pool.adapter`, contiguous. Nothing else is written.

    The call allocates nothing and does not wait for the device.
    """
    group, tables, segments = call.group, call.tables, call.segments
    if not segments.num_segments:
        return
    assert tokens.is_contiguous()
    assert y.is_contiguous()
    assert y.dtype is pool.adapter.dtype
    page_elements, row_len = pool.adapter.shape[2], y.shape[1]
    ids = pool.raw.view(torch.int32)
    block = min(MAX_BLOCK, triton.next_power_of_2(row_len))
    replace_rows_kernel[triton.cdiv(row_len, block), segments.num_segments](
        tokens, y, pool.adapter, ids, tables.page_table, tables.off, tables.rank,
        segments.rows, segments.starts, segments.slots,
        MODULE=group.modules[0], M=tables.rank.shape[2], PARTS=tables.off.shape[3],
        MAX_PAGES=tables.page_table.shape[1], E=page_elements, W=ids.shape[2], VOCAB=group.in_features,
        ROW_LEN=row_len, PADDED=row_layout(row_len, page_elements).padded_len,
        STEPS=group.in_features.bit_length(), ROWS=TILE_ROWS, BLOCK=block, num_warps=4,
    )  # fmt: skip


def replace_columns(pool: PoolViews, x: torch.Tensor, call: LoraCall, y: torch.Tensor) -> None:
    """`y[t, id] = x[t] · row of id` for each row `t` of each segment and each id whose row the adapter replaces.

    - `pool` contains flat pages; `layout.py` describes how trained rows are stored.
    - `x` `[T, hidden_size]`, last axis contiguous.
    - `call` as for `lora_shrink`, but with the tables `AdapterTables.trained_rows`. The grid does not depend on the
      adapters: each program continues until it has passed the adapter's last row.
    - `y` `[T, num_columns]`, a column for each id, last axis contiguous. Nothing else is written.

    Products are summed in float32. The call allocates nothing and does not wait for the device.
    """
    group, tables, segments = call.group, call.tables, call.segments
    if not segments.num_segments:
        return
    assert x.stride(1) == 1
    assert y.stride(1) == 1
    page_elements = pool.adapter.shape[2]
    layout = row_layout(group.in_features, page_elements)
    ids = pool.raw.view(torch.int32)
    vocab_size = group.out_features[0]
    num_programs = min(triton.cdiv(vocab_size, BLOCK_ROWS), max(1, TARGET_PROGRAMS // segments.num_segments))
    replace_columns_kernel[power_of_two_within(num_programs), segments.num_segments](
        x, y, pool.adapter, ids, tables.page_table, tables.off, tables.rank,
        segments.rows, segments.starts, segments.slots, x.stride(0), y.stride(0),
        MODULE=group.modules[0], M=tables.rank.shape[2], PARTS=tables.off.shape[3],
        MAX_PAGES=tables.page_table.shape[1], E=page_elements, W=ids.shape[2], VOCAB=vocab_size,
        IN=group.in_features, PADDED=layout.padded_len, ROWS=TILE_ROWS, BLOCK_N=BLOCK_ROWS,
        BLOCK_K=min(BLOCK_COLUMNS, layout.chunk_len), DOT_DTYPE=dot_dtype(x.dtype, pool.adapter.dtype), num_warps=4,
    )  # fmt: skip
