"""The layout of K and V in pages on the CPU, and the kernel that stores a step's rows.

A page of one layer contains K `[num_kv_heads, head_dim, page_tokens]`, then V `[num_kv_heads, page_tokens, head_dim]`.
Activations are float32, passed by address and row stride. The pool is `[P, L, elements]`, float32 or bfloat16 bits as
uint16.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from loramux.kernels.cpu.instructions.compiled import helper, kernel
from loramux.kernels.cpu.instructions.vectors import floats_at, narrow

PAGE_TOKENS = 16
"""Tokens per page. The scores of one head over one page fill sixteen lanes."""

SERIAL_WORK = 200_000
"""Number of elements to copy below which waking other threads costs more than it saves."""


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
