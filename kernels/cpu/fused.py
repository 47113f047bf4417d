"""Norms, rotary embedding and gates on the CPU, each in one pass over its rows.

Activations are float32, passed by address and row stride.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import prange

from loramux.kernels.cpu.instructions.compiled import exact, helper, kernel
from loramux.kernels.cpu.instructions.vectors import PANEL, exponential, floats_at, load, plus, splat, times, total

SERIAL_WORK = 30_000
"""Number of elements below which waking other threads costs more than it saves."""


@exact
def _sum_of_squares(x: Any, size: int) -> Any:
    """The sum of `x[i]²` in a fixed order.

    LLVM would choose one order in the serial loop and another in the parallel loop, so a row's result would depend on
    the number of rows.
    """
    first = second = third = fourth = splat(np.float32(0))
    unrolled, whole = size // (4 * PANEL) * (4 * PANEL), size // PANEL * PANEL
    for i in range(0, unrolled, 4 * PANEL):
        a, b, c, d = load(x, i), load(x, i + PANEL), load(x, i + 2 * PANEL), load(x, i + 3 * PANEL)
        first, second = plus(first, times(a, a)), plus(second, times(b, b))
        third, fourth = plus(third, times(c, c)), plus(fourth, times(d, d))
    for i in range(unrolled, whole, PANEL):
        a = load(x, i)
        first = plus(first, times(a, a))
    rest = np.float32(0)
    for i in range(whole, size):
        rest += x[i] * x[i]
    return total(plus(plus(first, second), plus(third, fourth))) + rest


@exact
def norm_row(x_address: int, out_address: int, weight_address: int, size: int, eps: Any) -> None:
    x, out, weight = floats_at(x_address), floats_at(out_address), floats_at(weight_address)
    factor = np.float32(1) / np.sqrt(_sum_of_squares(x, size) / np.float32(size) + eps)
    for i in range(size):
        out[i] = x[i] * factor * weight[i]


@kernel
def rms_norm(
    x_address: int, x_stride: int, out_address: int, weight_address: int, num_rows: int, size: int, eps: Any
) -> None:
    """`out[t] = x[t] / sqrt(mean(x[t]²) + eps) * weight`. `out` is contiguous `[num_rows, size]`."""
    if num_rows * size < SERIAL_WORK:
        for t in range(num_rows):
            norm_row(x_address + 4 * t * x_stride, out_address + 4 * t * size, weight_address, size, eps)
    else:
        for t in prange(num_rows):
            norm_row(x_address + 4 * t * x_stride, out_address + 4 * t * size, weight_address, size, eps)


@helper
def add_norm_row(
    x_address: int, residual_address: int, out_address: int, weight_address: int, size: int, eps: Any
) -> None:
    x, residual = floats_at(x_address), floats_at(residual_address)
    for i in range(size):
        residual[i] += x[i]
    # The row is still in the cache, and a separate loop produces the same bits as `rms_norm`.
    norm_row(residual_address, out_address, weight_address, size, eps)


@kernel
def add_rms_norm(
    x_address: int,
    x_stride: int,
    residual_address: int,
    residual_stride: int,
    out_address: int,
    weight_address: int,
    num_rows: int,
    size: int,
    eps: Any,
) -> None:
    """Add `x` to `residual` in place, and store `rms_norm` of the sum in `out`, contiguous `[num_rows, size]`."""
    if num_rows * size < SERIAL_WORK:
        for t in range(num_rows):
            x, residual = x_address + 4 * t * x_stride, residual_address + 4 * t * residual_stride
            add_norm_row(x, residual, out_address + 4 * t * size, weight_address, size, eps)
    else:
        for t in prange(num_rows):
            t_x, t_residual = x_address + 4 * t * x_stride, residual_address + 4 * t * residual_stride
            add_norm_row(t_x, t_residual, out_address + 4 * t * size, weight_address, size, eps)


@helper
def rotate_row(row_address: int, num_heads: int, head_dim: int, cos_address: int, sin_address: int, half: int) -> None:
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
    """Rotate q and k in place. `cos` and `sin` are contiguous `[num_rows, half]`. See `ReferenceKernels.rotary`."""
    if num_rows * (num_heads + num_kv_heads) * half < SERIAL_WORK:
        for t in range(num_rows):
            cos, sin = cos_address + 4 * t * half, sin_address + 4 * t * half
            rotate_row(q_address + 4 * t * q_stride, num_heads, head_dim, cos, sin, half)
            rotate_row(k_address + 4 * t * k_stride, num_kv_heads, head_dim, cos, sin, half)
    else:
        for t in prange(num_rows):
            t_cos, t_sin = cos_address + 4 * t * half, sin_address + 4 * t * half
            rotate_row(q_address + 4 * t * q_stride, num_heads, head_dim, t_cos, t_sin, half)
            rotate_row(k_address + 4 * t * k_stride, num_kv_heads, head_dim, t_cos, t_sin, half)


@helper
def silu_row(row_address: int, out_address: int, size: int) -> None:
    gate, up, out = floats_at(row_address), floats_at(row_address + 4 * size), floats_at(out_address)
    for i in range(size):
        out[i] = gate[i] * up[i] / (np.float32(1) + exponential(-gate[i]))


@helper
def gelu_row(row_address: int, out_address: int, size: int) -> None:
    """`(1 + tanh(y)) / 2` is the sigmoid of `2 * y`, here with `2 * y = 2 * sqrt(2 / pi) * (g + 0.044715 * g³)`."""
    gate, up, out = floats_at(row_address), floats_at(row_address + 4 * size), floats_at(out_address)
    for i in range(size):
        cubic = gate[i] + np.float32(0.044715) * gate[i] * gate[i] * gate[i]
        out[i] = gate[i] * up[i] / (np.float32(1) + exponential(np.float32(-1.5957691216057308) * cubic))


@helper
def clamped_silu_row(row_address: int, out_address: int, size: int, alpha: Any, limit: Any) -> None:
    gates, ups, out = floats_at(row_address), floats_at(row_address + 4 * size), floats_at(out_address)
    for i in range(size):
        gate, up = gates[i], ups[i]
        # Comparisons with NaN are false, so a NaN stays NaN.
        if gate > limit:
            gate = limit
        if up > limit:
            up = limit
        if up < -limit:
            up = -limit
        out[i] = gate * (up + np.float32(1)) / (np.float32(1) + exponential(-alpha * gate))


@kernel
def silu_and_mul(x_address: int, x_stride: int, out_address: int, num_rows: int, size: int) -> None:
    """`out[t] = silu(x[t, :size]) * x[t, size:]`. `out` is contiguous `[num_rows, size]`."""
    if num_rows * size < SERIAL_WORK:
        for t in range(num_rows):
            silu_row(x_address + 4 * t * x_stride, out_address + 4 * t * size, size)
    else:
        for t in prange(num_rows):
            silu_row(x_address + 4 * t * x_stride, out_address + 4 * t * size, size)


@kernel
def gelu_and_mul(x_address: int, x_stride: int, out_address: int, num_rows: int, size: int) -> None:
    """`out[t] = gelu(x[t, :size]) * x[t, size:]` with the tanh form of gelu; `out` is contiguous `[num_rows, size]`."""
    if num_rows * size < SERIAL_WORK:
        for t in range(num_rows):
            gelu_row(x_address + 4 * t * x_stride, out_address + 4 * t * size, size)
    else:
        for t in prange(num_rows):
            gelu_row(x_address + 4 * t * x_stride, out_address + 4 * t * size, size)


@kernel
def clamped_silu_and_mul(
    x_address: int, x_stride: int, out_address: int, num_rows: int, size: int, alpha: Any, limit: Any
) -> None:
    """Compute `out` of `reference.fused.clamped_silu_and_mul`, contiguous `[num_rows, size]`."""
    factor, most = np.float32(alpha), np.float32(limit)
    if num_rows * size < SERIAL_WORK:
        for t in range(num_rows):
            clamped_silu_row(x_address + 4 * t * x_stride, out_address + 4 * t * size, size, factor, most)
    else:
        for t in prange(num_rows):
            clamped_silu_row(x_address + 4 * t * x_stride, out_address + 4 * t * size, size, factor, most)
