"""The layout of K and V in pages on the CPU, and the kernels that store a step's rows.

A page of one layer contains K `[num_kv_heads, head_dim, page_tokens]`, then V `[num_kv_heads, page_tokens, head_dim]`.
Activations are float32, passed by address and row stride. The pool is `[P, L, elements]`: float32, bfloat16 bits as
uint16, or int8 codes. The scales of codes are an array `[P, L, scales]` of bfloat16 bits as uint16. In each layer, it
begins with the scales of K `[num_kv_heads, page_tokens]`, followed by those of V.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from loramux.kernels.cpu.instructions.compiled import helper, kernel
from loramux.kernels.cpu.instructions.vectors import float_bits, float_of_bits, floats_at, narrow, widen

PAGE_TOKENS = 16
"""Tokens per page. The scores of one head over one page fill sixteen lanes."""

SERIAL_WORK = 200_000
"""Number of elements to copy below which waking other threads costs more than it saves."""

LARGEST_CODE = np.float32(127)
SMALLEST_SCALE = np.float32(2.0**-126)

ROUNDING = np.float32(12582912)
"""1.5 * 2**23. Floats of this size are integers, so adding it to a small float rounds the float, and leaves the rounded
integer in the low bits of the sum.
"""

INFINITY_BITS = 0x7F800000


@helper
def page_start(pool: Any, page: int, layer: int) -> int:
    """Index in the flat pool of the first element of a page in a layer."""
    return (np.int64(page) * pool.shape[1] + layer) * pool.shape[2]


@helper
def write_row(k: Any, i: int, v: Any, j: int, pool: Any, start: int, token: int, num_heads: int, head_dim: int) -> None:
    v_start = start + num_heads * head_dim * PAGE_TOKENS
    for head in range(num_heads):
        k_head = start + head * head_dim * PAGE_TOKENS + token
        v_head = v_start + (head * PAGE_TOKENS + token) * head_dim
        for d in range(head_dim):
            pool[k_head + d * PAGE_TOKENS] = narrow(pool, k[i + head * head_dim + d])
            pool[v_head + d] = narrow(pool, v[j + head * head_dim + d])


@helper
def _write_codes(x: Any, i: int, pool: Any, first: int, step: int, scales: Any, place: int, head_dim: int) -> None:
    """Store the codes of `x[i:i + head_dim]` at `pool[first + d * step]`, and their scale at `scales[place]`.

    `reference.attention.to_codes` is the specification.
    """
    # Without their signs, floats have the same order as their bits, and NaN comes after infinity.
    most = np.int32(0)
    for d in range(head_dim):
        most = max(most, np.int32(float_bits(x[i + d]) & np.int32(0x7FFFFFFF)))
    scale, inverse = np.float32(np.nan), np.float32(0)
    if most < INFINITY_BITS:
        scale = max(float_of_bits(most) / LARGEST_CODE, SMALLEST_SCALE)
        inverse = np.float32(1) / widen(narrow(scales, scale))
    scales[place] = narrow(scales, scale)
    for d in range(head_dim):
        pool[first + d * step] = np.int8(float_bits(x[i + d] * inverse + ROUNDING))


@helper
def write_row_of_codes(
    k: Any,
    i: int,
    v: Any,
    j: int,
    pool: Any,
    start: int,
    scales: Any,
    first_scale: int,
    token: int,
    num_heads: int,
    head_dim: int,
) -> None:
    """`write_row` for a pool of int8 codes. The page's scales begin at `first_scale`."""
    v_start, v_scale = start + num_heads * head_dim * PAGE_TOKENS, first_scale + num_heads * PAGE_TOKENS
    for head in range(num_heads):
        place = head * PAGE_TOKENS + token
        k_first, v_first = start + head * head_dim * PAGE_TOKENS + token, v_start + place * head_dim
        _write_codes(k, i + head * head_dim, pool, k_first, PAGE_TOKENS, scales, first_scale + place, head_dim)
        _write_codes(v, j + head * head_dim, pool, v_first, 1, scales, v_scale + place, head_dim)


@kernel
def write(
    k_address: int,
    k_stride: int,
    v_address: int,
    v_stride: int,
    pool: Any,
    layer: int,
    kv_slots: Any,
    num_heads: int,
    head_dim: int,
) -> None:
    """Store K and V of row `t` at token `kv_slots[t] % 16` of page `kv_slots[t] // 16`.

    `kv_slots` is int64 `[T]`. `num_heads` is the number of KV heads.
    """
    flat_pool = pool.reshape(-1)
    num_rows = kv_slots.shape[0]
    if num_rows * num_heads * head_dim * 2 < SERIAL_WORK:
        k, v = floats_at(k_address), floats_at(v_address)
        for t in range(num_rows):
            start = page_start(pool, kv_slots[t] // PAGE_TOKENS, layer)
            token = kv_slots[t] % PAGE_TOKENS
            write_row(k, t * k_stride, v, t * v_stride, flat_pool, start, token, num_heads, head_dim)
    else:
        for t in prange(num_rows):
            start = page_start(pool, kv_slots[t] // PAGE_TOKENS, layer)
            token = kv_slots[t] % PAGE_TOKENS
            k_row, v_row = floats_at(k_address), floats_at(v_address)
            write_row(k_row, t * k_stride, v_row, t * v_stride, flat_pool, start, token, num_heads, head_dim)


@kernel
def write_codes(
    k_address: int,
    k_stride: int,
    v_address: int,
    v_stride: int,
    pool: Any,
    scales: Any,
    layer: int,
    kv_slots: Any,
    num_heads: int,
    head_dim: int,
) -> None:
    """`write` for a pool of int8 codes, whose `scales` are an array `[P, L, scales]`."""
    flat_pool, flat_scales = pool.reshape(-1), scales.reshape(-1)
    for t in prange(kv_slots.shape[0]):
        page = kv_slots[t] // PAGE_TOKENS
        k_row, v_row = floats_at(k_address), floats_at(v_address)
        write_row_of_codes(
            k_row, t * k_stride, v_row, t * v_stride, flat_pool, page_start(pool, page, layer), flat_scales,
            page_start(scales, page, layer), kv_slots[t] % PAGE_TOKENS, num_heads, head_dim,
        )  # fmt: skip
