"""Norm, rotary embedding and gate on the CPU, each one pass over its rows.

Activations are float32 by address and row stride.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from loramux.kernels.compiled import helper, kernel
from loramux.kernels.cpu_vectors import exponential, floats_at

SERIAL_WORK = 30_000
"""Elements below which waking the other threads costs more than it saves."""


@helper
def _norm_row(x_address: int, out_address: int, weight_address: int, size: int, eps: Any) -> None:
    x, out, weight = floats_at(x_address), floats_at(out_address), floats_at(weight_address)
    squares = np.float32(0)
    for i in range(size):
        squares += x[i] * x[i]
    factor = np.float32(1) / np.sqrt(squares / np.float32(size) + eps)
    for i in range(size):
        out[i] = x[i] * factor * weight[i]


@kernel
def rms_norm(
    x_address: int, x_stride: int, out_address: int, weight_address: int, num_rows: int, size: int, eps: Any
) -> None:
    """`out[t] = x[t] / sqrt(mean(x[t]²) + eps) * weight`; `out` is contiguous `[num_rows, size]`."""
    if num_rows * size < SERIAL_WORK:
        for t in range(num_rows):
            _norm_row(x_address + 4 * t * x_stride, out_address + 4 * t * size, weight_address, size, eps)
    else:
        for t in prange(num_rows):
            _norm_row(x_address + 4 * t * x_stride, out_address + 4 * t * size, weight_address, size, eps)


@helper
def _rotate_row(row_address: int, num_heads: int, head_dim: int, cos_address: int, sin_address: int, half: int) -> None:
    row, cos, sin = floats_at(row_address), floats_at(cos_address), floats_at(sin_address)
    for head in range(num_heads):
        begin = head * head_dim
        for i in range(half):
            a, b = row[begin + i], row[begin + half + i]
            row[begin + i] = a * cos[i] - b * sin[i]
            row[begin + half + i] = b * cos[i] + a * sin[i]


@kernel
def rotary(
    q_address: int,
    q_stride: int,
    num_heads: int,
    k_address: int,
    k_stride: int,
    num_kv_heads: int,
    head_dim: int,
    cos_address: int,
    sin_address: int,
    num_rows: int,
    half: int,
) -> None:
    """Rotate q and k in place; `cos` and `sin` are contiguous `[num_rows, half]`; see `ReferenceKernels.rotary`."""
    if num_rows * (num_heads + num_kv_heads) * half < SERIAL_WORK:
        for t in range(num_rows):
            cos, sin = cos_address + 4 * t * half, sin_address + 4 * t * half
            _rotate_row(q_address + 4 * t * q_stride, num_heads, head_dim, cos, sin, half)
            _rotate_row(k_address + 4 * t * k_stride, num_kv_heads, head_dim, cos, sin, half)
    else:
        for t in prange(num_rows):
            t_cos, t_sin = cos_address + 4 * t * half, sin_address + 4 * t * half
            _rotate_row(q_address + 4 * t * q_stride, num_heads, head_dim, t_cos, t_sin, half)
            _rotate_row(k_address + 4 * t * k_stride, num_kv_heads, head_dim, t_cos, t_sin, half)


@helper
def _gate_row(row_address: int, out_address: int, size: int) -> None:
    gate, up, out = floats_at(row_address), floats_at(row_address + 4 * size), floats_at(out_address)
    for i in range(size):
        out[i] = gate[i] * up[i] / (np.float32(1) + exponential(-gate[i]))


@kernel
def silu_and_mul(x_address: int, x_stride: int, out_address: int, num_rows: int, size: int) -> None:
    """`out[t] = silu(x[t, :size]) * x[t, size:]`; `out` is contiguous `[num_rows, size]`."""
    if num_rows * size < SERIAL_WORK:
        for t in range(num_rows):
            _gate_row(x_address + 4 * t * x_stride, out_address + 4 * t * size, size)
    else:
        for t in prange(num_rows):
            _gate_row(x_address + 4 * t * x_stride, out_address + 4 * t * size, size)
