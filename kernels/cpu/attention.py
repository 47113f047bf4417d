"""Attention on the CPU. K and V are read directly from pages, whose layout `kv.py` describes.

A tile consists of a few consecutive query rows of all heads that share one KV head, so each key and value is loaded and
widened once per tile. K is stored transposed in its page, so the scores of its sixteen tokens fill sixteen lanes, and
neither K nor V has to be rearranged. A row's result is bitwise the same whichever tile contains the row.

In a pool of int8 codes, each key and value has a scale. The scales of a page's keys multiply its sixteen scores, and
those of its values multiply its sixteen weights, so the codes are only converted to floats.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from loramux.kernels.cpu.instructions.blocks import add_half_panels, add_panels, begin_outputs
from loramux.kernels.cpu.instructions.compiled import exact, helper, kernel
from loramux.kernels.cpu.instructions.vectors import (
    PANEL,
    exponential,
    exponentials,
    floats_at,
    halves_at,
    larger,
    largest,
    load,
    minus,
    over,
    plus,
    prefetch,
    splat,
    store,
    times,
    total,
)
from loramux.kernels.cpu.kv import PAGE_TOKENS, page_start

TILE_ROWS = 16
"""Maximum number of query rows times heads in a tile. If a group has more heads than this, a tile has one query row."""

LINE_BYTES = 64
"""Bytes between prefetches: one cache line."""

SERIAL_WORK = 200_000
"""Number of multiplications below which waking other threads costs more than it saves."""


@exact
def _cap_scores(scores: Any, num_scores: int, scale: Any, soft_cap: Any) -> None:
    """Replace scores by `cap * tanh(scale * score / cap)`, in whole panels."""
    for s in range(0, num_scores, PANEL):
        # tanh(x) is 1 - 2 / (exp(2 * x) + 1).
        power = exponentials(times(load(scores, s), np.float32(2) * scale / soft_cap))
        store(scores, s, minus(soft_cap, over(np.float32(2) * soft_cap, plus(power, np.float32(1)))))


@exact
def _softmax(scores: Any, begin: int, end: int, num_scores: int, scale: Any, soft_cap: Any, sink_address: int) -> Any:
    """Turn scores `[begin, end)` into unnormalised weights and all others into 0. Return the sum of the weights.

    `num_scores` is a multiple of the panel size. A score's lane is always its token's position in the page. Unless
    `sink_address` is 0, the sum includes the weight of the score at that address.
    """
    if soft_cap > 0:
        _cap_scores(scores, num_scores, scale, soft_cap)
        scale = np.float32(1)
    for s in range(begin):
        scores[s] = -np.float32(np.inf)
    for s in range(end, num_scores):
        scores[s] = -np.float32(np.inf)
    most = splat(-np.float32(np.inf))
    for s in range(0, num_scores, PANEL):
        most = larger(load(scores, s), most)
    top = largest(most)
    if sink_address != 0:
        # Include the sink in the maximum, so that no weight exceeds 1.
        sink = floats_at(sink_address)[0]
        top = max(top, sink / scale)
    weights = splat(np.float32(0))
    for s in range(0, num_scores, PANEL):
        lanes = exponentials(times(minus(load(scores, s), top), scale))
        weights = plus(weights, lanes)
        store(scores, s, lanes)
    # The sum includes exp(-87) for each masked score, which is negligible next to the largest weight, 1.
    for s in range(begin):
        scores[s] = np.float32(0)
    for s in range(end, num_scores):
        scores[s] = np.float32(0)
    if sink_address != 0:
        return total(weights) + exponential(sink - top * scale)
    return total(weights)


@helper
def _fetch_page(pool: Any, page: int, layer: int, head: int, num_kv_heads: int, head_size: int, is_v: int) -> None:
    start = page_start(pool, page, layer) + (is_v * num_kv_heads + head) * head_size
    flat_pool = pool.reshape(-1)
    for e in range(0, head_size, LINE_BYTES // pool.itemsize):
        prefetch(flat_pool, start + e)


@helper
def _scale_panels(values: int, step: int, num_rows: int, scales: int) -> None:
    """`values[r][o] *= scales[o]` for 16 values `o` of each row. `scales` is the address of bfloat16 numbers."""
    lanes = load(halves_at(scales), 0)
    for r in range(num_rows):
        row = floats_at(values + r * step)
        store(row, 0, times(load(row, 0), lanes))


@helper
def attend_tile(
    q_address: int,
    q_stride: int,
    out_address: int,
    out_stride: int,
    num_tokens: int,
    pool: Any,
    layer: int,
    pages: Any,
    page_begin: int,
    length: int,
    window: int,
    head: int,
    group_size: int,
    num_kv_heads: int,
    head_dim: int,
    scale: Any,
    soft_cap: Any,
    sinks: int,
    scales: int,
    num_scales: int,
    q_tile: int,
    out_tile: int,
    scores: int,
    row_len: int,
    weights: Any,
) -> None:
    """Compute attention for the last `num_tokens` rows of a context of `length` tokens and the heads of KV head `head`.

    `q_address` and `out_address` point to the tile's first row and head. The sequence's pages begin at
    `pages[page_begin]`. `q_tile`, `out_tile`, `scores` and `weights` are scratch for the tile's rows. A row of scores
    has `row_len` elements. `scales` is the address of the codes' scales, of which a page has `num_scales` in each
    layer, or 0.
    """
    flat_pool = pool.reshape(-1)
    num_rows, head_size = num_tokens * group_size, head_dim * PAGE_TOKENS
    # Bytes from the scales of one page to those of the next, and the scales of this head's keys in page 0.
    scales_step, k_scales = 2 * num_scales * pool.shape[1], scales + 2 * (layer * num_scales + head * PAGE_TOKENS)
    for t in range(num_tokens):
        row, copy = floats_at(q_address + 4 * t * q_stride), floats_at(q_tile + 4 * t * group_size * head_dim)
        found = floats_at(out_tile + 4 * t * group_size * head_dim)
        for d in range(group_size * head_dim):
            copy[d] = row[d]
            found[d] = np.float32(0)
    # The first query row sees keys from `first_key` on. With a window, later rows start at later keys.
    first_key = max(0, length - num_tokens + 1 - window)
    first_page, last_page = first_key // PAGE_TOKENS, (length + PAGE_TOKENS - 1) // PAGE_TOKENS
    for p in range(first_page, last_page):
        # Prefetch V, which is needed once all scores have been computed.
        _fetch_page(pool, pages[page_begin + p], layer, head, num_kv_heads, head_size, 1)
        if p + 1 < last_page:
            _fetch_page(pool, pages[page_begin + p + 1], layer, head, num_kv_heads, head_size, 0)
        k = page_start(pool, pages[page_begin + p], layer) + head * head_size
        s = scores + 4 * (p - first_page) * PAGE_TOKENS
        begin_outputs(s, 4 * row_len, num_rows, PAGE_TOKENS, 0)
        add_panels(q_tile, 4 * head_dim, num_rows, flat_pool, k, PAGE_TOKENS, head_dim, s, 4 * row_len)
        if scales != 0:
            _scale_panels(s, 4 * row_len, num_rows, k_scales + np.int64(pages[page_begin + p]) * scales_step)

    start, num_scores = first_page * PAGE_TOKENS, (last_page - first_page) * PAGE_TOKENS
    for t in range(num_tokens):
        position = length - num_tokens + t
        begin, end = max(0, position + 1 - window) - start, position + 1 - start
        for g in range(group_size):
            r = t * group_size + g
            sink = sinks + 4 * (head * group_size + g) if sinks != 0 else 0
            weights[r] = _softmax(
                floats_at(scores + 4 * r * row_len), begin, end, num_scores, np.float32(scale), np.float32(soft_cap),
                sink,
            )  # fmt: skip

    by_panel = head_dim - head_dim % PANEL
    for p in range(first_page, last_page):
        v = page_start(pool, pages[page_begin + p], layer) + (num_kv_heads + head) * head_size
        # The page's tokens that at least one row of the tile sees.
        first, last = max(0, first_key - p * PAGE_TOKENS), min(PAGE_TOKENS, length - p * PAGE_TOKENS)
        v += first * head_dim
        s = scores + 4 * (p - first_page) * PAGE_TOKENS
        if scales != 0:
            v_scales = k_scales + 2 * num_kv_heads * PAGE_TOKENS + np.int64(pages[page_begin + p]) * scales_step
            _scale_panels(s, 4 * row_len, num_rows, v_scales)
        s += 4 * first
        for d in range(0, by_panel, PANEL):
            add_panels(
                s, 4 * row_len, num_rows, flat_pool, v + d, head_dim, last - first, out_tile + 4 * d, 4 * head_dim
            )
        if by_panel < head_dim:
            add_half_panels(
                s, 4 * row_len, num_rows, flat_pool, v + by_panel, head_dim, last - first,
                out_tile + 4 * by_panel, 4 * head_dim,
            )  # fmt: skip
    for t in range(num_tokens):
        row, found = floats_at(out_address + 4 * t * out_stride), floats_at(out_tile + 4 * t * group_size * head_dim)
        for g in range(group_size):
            share = np.float32(1) / weights[t * group_size + g]
            for d in range(g * head_dim, (g + 1) * head_dim):
                row[d] = found[d] * share


@helper
def _tile_tokens(group_size: int) -> int:
    return max(1, TILE_ROWS // group_size)


@helper
def _tile_cost(num_tokens: int, length: int, window: int) -> int:
    """Estimated cost of a tile at the end of a context of `length` tokens, in keys times query rows."""
    num_keys: Any = min(window + num_tokens, length)
    return num_tokens * num_keys


@helper
def _attend_share(
    low: int,
    high: int,
    q_address: int,
    q_stride: int,
    out_address: int,
    out_stride: int,
    pool: Any,
    layer: int,
    cu_q: Any,
    seq_lens: Any,
    pages: Any,
    page_starts: Any,
    group_size: int,
    num_kv_heads: int,
    head_dim: int,
    scale: Any,
    window: int,
    soft_cap: Any,
    sinks: int,
    scales: int,
    num_scales: int,
    row_len: int,
) -> None:
    """Compute the tiles that begin at a cumulative cost in `[low, high)`."""
    most = _tile_tokens(group_size)
    most_rows = most * group_size
    q_tile, out_tile = np.empty(most_rows * head_dim, np.float32), np.empty(most_rows * head_dim, np.float32)
    scores, weights = np.empty(most_rows * row_len, np.float32), np.empty(most_rows, np.float32)
    cursor = 0
    for n in range(seq_lens.shape[0]):
        first_row, end_row = np.int64(cu_q[n]), np.int64(cu_q[n + 1])
        for row in range(first_row, end_row, most):
            num_tokens: Any = min(most, end_row - row)
            length = np.int64(seq_lens[n]) - end_row + row + num_tokens
            cost = _tile_cost(num_tokens, length, window)
            for head in range(num_kv_heads):
                if low <= cursor < high:
                    column = head * group_size * head_dim
                    attend_tile(
                        q_address + 4 * (row * q_stride + column), q_stride,
                        out_address + 4 * (row * out_stride + column), out_stride, num_tokens,
                        pool, layer, pages, np.int64(page_starts[n]), length, window,
                        head, group_size, num_kv_heads, head_dim, scale, soft_cap, sinks, scales, num_scales,
                        np.int64(q_tile.ctypes.data), np.int64(out_tile.ctypes.data), np.int64(scores.ctypes.data),
                        row_len, weights,
                    )  # fmt: skip
                cursor += cost


@kernel
def attend(
    num_threads: int,
    q_address: int,
    q_stride: int,
    out_address: int,
    out_stride: int,
    pool: Any,
    layer: int,
    cu_q: Any,
    seq_lens: Any,
    pages: Any,
    page_starts: Any,
    group_size: int,
    num_kv_heads: int,
    head_dim: int,
    scale: Any,
    window: int,
    soft_cap: Any,
    sinks: int,
    scales: int,
    num_scales: int,
) -> None:
    """Compute attention for all sequences. See `ReferenceKernels.paged_attention`.

    Unless there is little work, the tiles are divided into `num_threads` shares of nearly equal cost. `cu_q`,
    `seq_lens`, `pages` and `page_starts` are int32. `window` is the maximum number of keys that a query sees; without a
    window, it is larger than any context. `soft_cap` 0 means no cap. `sinks` is the address of a float32 per head, or
    0. `scales` is the address of the scales `[P, L, num_scales]` of a pool of int8 codes, bfloat16, or 0. Its first
    scales are those of `kv.py`.
    """
    work: Any = np.int64(0)
    row_len: Any = np.int64(0)
    most = _tile_tokens(group_size)
    for n in range(seq_lens.shape[0]):
        first_row, end_row = np.int64(cu_q[n]), np.int64(cu_q[n + 1])
        for row in range(first_row, end_row, most):
            num_tokens: Any = min(most, end_row - row)
            length = np.int64(seq_lens[n]) - end_row + row + num_tokens
            work += _tile_cost(num_tokens, length, window) * num_kv_heads
            num_keys: Any = min(window + num_tokens - 1, length)
            num_pages = (length + PAGE_TOKENS - 1) // PAGE_TOKENS - (length - num_keys) // PAGE_TOKENS
            row_len = max(row_len, num_pages * PAGE_TOKENS)
    if work * group_size * head_dim * 2 < SERIAL_WORK:
        _attend_share(
            np.int64(0), work, q_address, q_stride, out_address, out_stride, pool, layer, cu_q, seq_lens, pages,
            page_starts, group_size, num_kv_heads, head_dim, scale, window, soft_cap, sinks, scales, num_scales,
            row_len,
        )  # fmt: skip
    else:
        for part in prange(num_threads):
            _attend_share(
                work * part // num_threads, work * (part + 1) // num_threads,
                q_address, q_stride, out_address, out_stride, pool, layer, cu_q, seq_lens, pages,
                page_starts, group_size, num_kv_heads, head_dim, scale, window, soft_cap, sinks, scales, num_scales,
                row_len,
            )  # fmt: skip
