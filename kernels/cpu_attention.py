"""Attention of sequences with one query row on the CPU, straight from the pages that `cpu_kv` describes.

With K transposed in its page, the scores of eight tokens are eight lanes, so neither K nor V is rearranged.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from loramux.kernels.compiled import helper, kernel
from loramux.kernels.cpu_kv import PAGE_TOKENS, page_start
from loramux.kernels.cpu_vectors import LANES, exponential, floats_at, load, multiply_add, store, zeros

SERIAL_WORK = 200_000
"""Multiplications below which waking the other threads costs more than it saves."""


@helper
def _scores(q: Any, i: int, pool: Any, k: int, head_dim: int, scores: Any, s: int) -> None:
    """Scores of one head for the 16 tokens of a page."""
    low, high = zeros(), zeros()
    for d in range(head_dim):
        low = multiply_add(q[i + d], load(pool, k + d * PAGE_TOKENS), low)
        high = multiply_add(q[i + d], load(pool, k + d * PAGE_TOKENS + LANES), high)
    store(scores, s, low)
    store(scores, s + LANES, high)


@helper
def _scores_4_heads(q: Any, i: int, pool: Any, k: int, head_dim: int, scores: Any, s: int, row_len: int) -> None:
    low0, low1, low2, low3 = zeros(), zeros(), zeros(), zeros()
    high0, high1, high2, high3 = zeros(), zeros(), zeros(), zeros()
    i1, i2, i3 = i + head_dim, i + 2 * head_dim, i + 3 * head_dim
    for d in range(head_dim):
        low_k, high_k = load(pool, k + d * PAGE_TOKENS), load(pool, k + d * PAGE_TOKENS + LANES)
        low0, high0 = multiply_add(q[i + d], low_k, low0), multiply_add(q[i + d], high_k, high0)
        low1, high1 = multiply_add(q[i1 + d], low_k, low1), multiply_add(q[i1 + d], high_k, high1)
        low2, high2 = multiply_add(q[i2 + d], low_k, low2), multiply_add(q[i2 + d], high_k, high2)
        low3, high3 = multiply_add(q[i3 + d], low_k, low3), multiply_add(q[i3 + d], high_k, high3)
    store(scores, s, low0)
    store(scores, s + LANES, high0)
    store(scores, s + row_len, low1)
    store(scores, s + row_len + LANES, high1)
    store(scores, s + 2 * row_len, low2)
    store(scores, s + 2 * row_len + LANES, high2)
    store(scores, s + 3 * row_len, low3)
    store(scores, s + 3 * row_len + LANES, high3)


@helper
def _softmax(scores: Any, begin: int, end: int, scale: Any, soft_cap: Any) -> Any:
    """Turn scores `[begin, end)` into weights, not yet divided by their sum, which is returned."""
    scale, soft_cap = np.float32(scale), np.float32(soft_cap)
    for s in range(begin, end):
        scores[s] *= scale
    if soft_cap > 0:
        for s in range(begin, end):
            # cap * tanh(s / cap)
            power = exponential(np.float32(2) * scores[s] / soft_cap)
            scores[s] = soft_cap - np.float32(2) * soft_cap / (power + np.float32(1))
    most = scores[begin]
    for s in range(begin, end):
        most = max(most, scores[s])
    weights = np.float32(0)
    for s in range(begin, end):
        scores[s] = exponential(scores[s] - most)
        weights += scores[s]
    return weights


@helper
def _add_values(
    pool: Any, v: int, first: int, last: int, head_dim: int, weights: Any, w: int, out: Any, o: int
) -> None:
    """Add tokens `[first, last)` of a page to one head's output."""
    for d in range(0, head_dim, LANES):
        lanes = load(out, o + d)
        for token in range(first, last):
            lanes = multiply_add(weights[w + token], load(pool, v + token * head_dim + d), lanes)
        store(out, o + d, lanes)


@helper
def _add_values_4_heads(
    pool: Any, v: int, first: int, last: int, head_dim: int, weights: Any, w: int, row_len: int, out: Any, o: int
) -> None:
    w1, w2, w3 = w + row_len, w + 2 * row_len, w + 3 * row_len
    o1, o2, o3 = o + head_dim, o + 2 * head_dim, o + 3 * head_dim
    for d in range(0, head_dim, LANES):
        lanes0, lanes1, lanes2, lanes3 = load(out, o + d), load(out, o1 + d), load(out, o2 + d), load(out, o3 + d)
        for token in range(first, last):
            values = load(pool, v + token * head_dim + d)
            lanes0 = multiply_add(weights[w + token], values, lanes0)
            lanes1 = multiply_add(weights[w1 + token], values, lanes1)
            lanes2 = multiply_add(weights[w2 + token], values, lanes2)
            lanes3 = multiply_add(weights[w3 + token], values, lanes3)
        store(out, o + d, lanes0)
        store(out, o1 + d, lanes1)
        store(out, o2 + d, lanes2)
        store(out, o3 + d, lanes3)


@helper
def _attend(
    q: Any,
    i: int,
    out: Any,
    o: int,
    pool: Any,
    layer: int,
    pages: Any,
    page_begin: int,
    first_key: int,
    length: int,
    head: int,
    group_size: int,
    num_kv_heads: int,
    head_dim: int,
    scale: Any,
    soft_cap: Any,
    scores: Any,
    row_len: int,
) -> None:
    """One query row, the `group_size` heads that read KV head `head`: `q` from `i` and `out` from `o` on.

    The sequence's pages begin at `pages[page_begin]`; `row_len` is the length of one head's scores.
    """
    flat_pool = pool.reshape(-1)
    first_page, last_page = first_key // PAGE_TOKENS, (length + PAGE_TOKENS - 1) // PAGE_TOKENS
    by_four = group_size - group_size % 4
    head_size = head_dim * PAGE_TOKENS
    for p in range(first_page, last_page):
        k = page_start(pool, pages[page_begin + p], layer) + head * head_size
        s = (p - first_page) * PAGE_TOKENS
        for g in range(0, by_four, 4):
            _scores_4_heads(q, i + g * head_dim, flat_pool, k, head_dim, scores, s + g * row_len, row_len)
        for g in range(by_four, group_size):
            _scores(q, i + g * head_dim, flat_pool, k, head_dim, scores, s + g * row_len)

    begin, end = first_key - first_page * PAGE_TOKENS, length - first_page * PAGE_TOKENS
    for d in range(group_size * head_dim):
        out[o + d] = np.float32(0)
    for g in range(group_size):
        weights = _softmax(scores, g * row_len + begin, g * row_len + end, scale, soft_cap)
        share = np.float32(1) / weights
        for s in range(g * row_len + begin, g * row_len + end):
            scores[s] *= share

    for p in range(first_page, last_page):
        v = page_start(pool, pages[page_begin + p], layer) + (num_kv_heads + head) * head_size
        s = (p - first_page) * PAGE_TOKENS
        first, last = max(0, begin - s), min(PAGE_TOKENS, end - s)
        for g in range(0, by_four, 4):
            w = s + g * row_len
            _add_values_4_heads(flat_pool, v, first, last, head_dim, scores, w, row_len, out, o + g * head_dim)
        for g in range(by_four, group_size):
            _add_values(flat_pool, v, first, last, head_dim, scores, s + g * row_len, out, o + g * head_dim)


@helper
def _decode_share(
    low: int,
    high: int,
    q_address: int,
    q_stride: int,
    out_address: int,
    out_stride: int,
    pool: Any,
    layer: int,
    sequences: Any,
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
    row_len: int,
) -> None:
    q, out = floats_at(q_address), floats_at(out_address)
    scores = np.empty(group_size * row_len, np.float32)
    cursor = 0
    for n in range(sequences.shape[0]):
        sequence = sequences[n]
        t, length = np.int64(cu_q[sequence]), np.int64(seq_lens[sequence])
        num_keys: Any = min(window, length)
        for head in range(num_kv_heads):
            if low <= cursor < high:
                column = head * group_size * head_dim
                _attend(
                    q, t * q_stride + column, out, t * out_stride + column,
                    pool, layer, pages, np.int64(page_starts[sequence]), length - num_keys, length,
                    head, group_size, num_kv_heads, head_dim, scale, soft_cap, scores, row_len,
                )  # fmt: skip
            cursor += num_keys


@kernel
def decode(
    num_threads: int,
    q_address: int,
    q_stride: int,
    out_address: int,
    out_stride: int,
    pool: Any,
    layer: int,
    sequences: Any,
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
) -> None:
    """Attention of the sequences that have one query row; see `ReferenceKernels.paged_attention`.

    The contexts are cut into `num_threads` equal shares. `sequences` int64 indexes `cu_q`, `seq_lens` and `page_starts`
    (all int32, as `pages` is); `window` is the number of keys that a query sees, larger than any context when there is
    no window; `soft_cap` is 0 where there is none.
    """
    work: Any = 0
    row_len: Any = 0
    for n in range(sequences.shape[0]):
        length = np.int64(seq_lens[sequences[n]])
        num_keys: Any = min(window, length)
        work += num_keys * num_kv_heads
        num_pages = (length + PAGE_TOKENS - 1) // PAGE_TOKENS - (length - num_keys) // PAGE_TOKENS
        row_len = max(row_len, num_pages * PAGE_TOKENS)
    if work * group_size * head_dim * 2 < SERIAL_WORK:
        _decode_share(
            0, work, q_address, q_stride, out_address, out_stride, pool, layer, sequences, cu_q, seq_lens, pages,
            page_starts, group_size, num_kv_heads, head_dim, scale, window, soft_cap, row_len,
        )  # fmt: skip
    else:
        for part in prange(num_threads):
            _decode_share(
                work * part // num_threads, work * (part + 1) // num_threads,
                q_address, q_stride, out_address, out_stride, pool, layer, sequences, cu_q, seq_lens, pages,
                page_starts, group_size, num_kv_heads, head_dim, scale, window, soft_cap, row_len,
            )  # fmt: skip
