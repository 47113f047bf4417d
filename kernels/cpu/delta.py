"""The causal convolution and the gated delta rule of hybrid decoders on a CPU.

Activations are float32, passed by address and row stride. `DeltaSpec` describes the state of a sequence; the pool is
passed as float32 `[P, elements]`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from loramux.kernels.cpu.instructions.compiled import helper, kernel
from loramux.kernels.cpu.instructions.vectors import (
    PANEL,
    exponential,
    floats_at,
    load,
    plus,
    prefetch,
    splat,
    store,
    times,
    total,
)

SOFTPLUS_LIMIT = np.float32(20)
"""Above this value, softplus is the identity, as in torch."""

L2_EPS = np.float32(1e-6)


@helper
def _row_start(pool: Any, pages: Any, first_page: int, row: int, k_dim: int) -> int:
    """Index in the flat pool at which a row of a state begins. The state's pages begin at `pages[first_page]`."""
    per_page = pool.shape[1] // k_dim
    return np.int64(pages[first_page + row // per_page]) * pool.shape[1] + row % per_page * k_dim


@helper
def _convolve_block(
    x_address: int, x_stride: int, y_address: int, y_stride: int, weight_address: int, weight_stride: int,
    num_rows: int, size: int, conv_len: int, pool: Any, pages: Any, first_page: int, tail_row: int, input_rows: int,
    k_dim: int, is_first: bool,
) -> None:  # fmt: skip
    """Convolve `size` channels over a sequence's rows, apply SiLU, and update the channels' part of the tail.

    The addresses point to the first channel.
    """
    flat_pool = pool.reshape(-1)
    for t in range(num_rows):
        y = floats_at(y_address + 4 * t * y_stride)
        for c in range(size):
            y[c] = np.float32(0)
        for j in range(conv_len):
            weight, source = floats_at(weight_address + 4 * j * weight_stride), t - conv_len + 1 + j
            if source >= 0:
                x = floats_at(x_address + 4 * source * x_stride)
                for c in range(size):
                    y[c] += weight[c] * x[c]
            elif not is_first:
                tail = _row_start(pool, pages, first_page, tail_row + (conv_len - 1 + source) * input_rows, k_dim)
                for c in range(size):
                    y[c] += weight[c] * flat_pool[tail + c]
        for c in range(size):
            y[c] = y[c] / (np.float32(1) + exponential(-y[c]))
    # Oldest first, so that an input that stays in the tail is moved before it is overwritten.
    for j in range(conv_len - 1):
        source = num_rows - conv_len + 1 + j
        kept = _row_start(pool, pages, first_page, tail_row + j * input_rows, k_dim)
        if source >= 0:
            x = floats_at(x_address + 4 * source * x_stride)
            for c in range(size):
                flat_pool[kept + c] = x[c]
        elif is_first:
            for c in range(size):
                flat_pool[kept + c] = np.float32(0)
        else:
            tail = _row_start(pool, pages, first_page, tail_row + (conv_len - 1 + source) * input_rows, k_dim)
            for c in range(size):
                flat_pool[kept + c] = flat_pool[tail + c]


@kernel
def convolve(
    x_address: int,
    x_stride: int,
    y_address: int,
    weight_address: int,
    channels: int,
    conv_len: int,
    pool: Any,
    cu_q: Any,
    seq_lens: Any,
    pages: Any,
    page_starts: Any,
    tail_row: int,
    k_dim: int,
) -> None:
    """Compute `y` of `reference.delta.convolve`, contiguous `[T, channels]`. `weight` is contiguous too.

    The layer's tail begins at row `tail_row` of each state.
    """
    input_rows = (channels + k_dim - 1) // k_dim
    for task in prange(seq_lens.shape[0] * input_rows):
        i, first = task // input_rows, task % input_rows * k_dim
        begin, num_rows = np.int64(cu_q[i]), np.int64(cu_q[i + 1] - cu_q[i])
        if num_rows:
            _convolve_block(
                x_address + 4 * (begin * x_stride + first), x_stride, y_address + 4 * (begin * channels + first),
                channels, weight_address + 4 * first, channels, num_rows, min(k_dim, channels - first), conv_len,
                pool, pages, np.int64(page_starts[i]), tail_row + task % input_rows, input_rows, k_dim,
                num_rows == seq_lens[i],
            )  # fmt: skip


@helper
def _read_unit(address: int, size: int, scale: Any, unit: Any) -> None:
    """`unit = x / |x| * scale` for the `size` elements of x at `address`."""
    x, square = floats_at(address), np.float32(0)
    for d in range(size):
        square += x[d] * x[d]
    factor = scale / np.sqrt(square + L2_EPS)
    for d in range(size):
        unit[d] = x[d] * factor


@helper
def _update_row(state: Any, start: int, k: Any, q: Any, size: int, decay: Any, strength: Any, v: Any) -> Any:
    """Decay one row of a matrix, move its product with k towards v, and return its product with q."""
    whole = size // PANEL * PANEL
    lanes, known = splat(np.float32(0)), np.float32(0)
    for d in range(0, whole, PANEL):
        lanes = plus(lanes, times(load(state, start + d), load(k, d)))
    for d in range(whole, size):
        known += state[start + d] * k[d]
    change = strength * (v - decay * (known + total(lanes)))
    lanes, found = splat(np.float32(0)), np.float32(0)
    for d in range(0, whole, PANEL):
        panel = plus(times(load(state, start + d), decay), times(load(k, d), change))
        store(state, start + d, panel)
        lanes = plus(lanes, times(panel, load(q, d)))
    for d in range(whole, size):
        element = decay * state[start + d] + change * k[d]
        state[start + d] = element
        found += element * q[d]
    return found + total(lanes)


@helper
def _update_head(
    qkv_address: int, qkv_stride: int, gates_address: int, gates_stride: int, rate: Any, bias: Any, y_address: int,
    y_stride: int, num_rows: int, head: int, group_size: int, num_k: int, num_v: int, k_dim: int, v_dim: int,
    pool: Any, pages: Any, first_page: int, matrix_row: int, is_first: bool,
) -> None:  # fmt: skip
    """Apply the rule to one value head over a sequence's rows. Its matrix begins at row `matrix_row` of the state."""
    flat_pool = pool.reshape(-1)
    starts = np.empty(v_dim, np.int64)
    for j in range(v_dim):
        starts[j] = _row_start(pool, pages, first_page, matrix_row + j, k_dim)
        if is_first:
            for d in range(k_dim):
                flat_pool[starts[j] + d] = np.float32(0)
    q, k = np.empty(k_dim, np.float32), np.empty(k_dim, np.float32)
    q_scale = np.float32(1) / np.sqrt(np.float32(k_dim))
    for t in range(num_rows):
        row = qkv_address + 4 * t * qkv_stride
        key_head = head // group_size
        _read_unit(row + 4 * key_head * k_dim, k_dim, q_scale, q)
        _read_unit(row + 4 * (num_k + key_head) * k_dim, k_dim, np.float32(1), k)
        v = floats_at(row + 4 * (2 * num_k * k_dim + head * v_dim))
        # Prefetch the next row, which is far away in memory. The state of this head fills the L1 cache.
        following = floats_at(row + 4 * qkv_stride)
        for d in range(0, k_dim, PANEL):
            prefetch(following, key_head * k_dim + d)
            prefetch(following, (num_k + key_head) * k_dim + d)
        for j in range(0, v_dim, PANEL):
            prefetch(following, 2 * num_k * k_dim + head * v_dim + j)
        gates, y = floats_at(gates_address + 4 * t * gates_stride), floats_at(y_address + 4 * t * y_stride)
        strength = np.float32(1) / (np.float32(1) + exponential(-gates[head]))
        step = gates[num_v + head] + bias
        if step < SOFTPLUS_LIMIT:
            step = np.log1p(exponential(step))
        decay = exponential(rate * step)
        for j in range(v_dim):
            y[j] = _update_row(flat_pool, starts[j], k, q, k_dim, decay, strength, v[j])


@kernel
def delta_rule(
    qkv_address: int,
    qkv_stride: int,
    gates_address: int,
    gates_stride: int,
    rates_address: int,
    y_address: int,
    num_k: int,
    num_v: int,
    k_dim: int,
    v_dim: int,
    pool: Any,
    cu_q: Any,
    seq_lens: Any,
    pages: Any,
    page_starts: Any,
    first_row: int,
) -> None:
    """Compute `y` of `reference.delta.delta_rule`, contiguous `[T, num_v * v_dim]`.

    The layer begins at row `first_row` of each state.
    """
    for task in prange(seq_lens.shape[0] * num_v):
        i, head = task // num_v, task % num_v
        begin, num_rows = np.int64(cu_q[i]), np.int64(cu_q[i + 1] - cu_q[i])
        rates = floats_at(rates_address)
        if num_rows:
            _update_head(
                qkv_address + 4 * begin * qkv_stride, qkv_stride, gates_address + 4 * begin * gates_stride,
                gates_stride, rates[head], rates[num_v + head], y_address + 4 * (begin * num_v + head) * v_dim,
                num_v * v_dim, num_rows, head, num_v // num_k, num_k, num_v, k_dim, v_dim, pool, pages,
                np.int64(page_starts[i]), first_row + head * v_dim, num_rows == seq_lens[i],
            )  # fmt: skip
