"""Norms and gates on a GPU, each in one pass over its rows.

Activations are float32, float16 or bfloat16 with a contiguous last axis. Arithmetic is float32, and each result is
rounded once, when it is stored. With `pdl`, a launch may start before the previous kernel has ended, and waits for it
before it reads activations (`launches.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux.kernels.gpu.launches import overlapping
from loramux.kernels.gpu.sigmoid import sigmoid

_PROGRAM_ELEMENTS = 1024
"""Maximum number of elements per program, if several short rows share a program."""


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None, *, pdl: bool = False
) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last axis.

    `x` is `[T, n]` or `[T, heads, n]`, and its rows may be views into wider rows. `weight` is `[n]`. The result is
    contiguous, has the shape and dtype of `x`, and is stored in `out` if given.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    inner = x.shape[1] if x.dim() == 3 else 1
    strides = x.stride(0), x.stride(-2)
    _launch_norm(x, x, weight, eps, out, x.shape[0] * inner, inner, *strides, has_residual=False, pdl=pdl)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Add `x` to `residual` in place, and return `rms_norm(residual, weight, eps)` of the rounded sum.

    `x` and `residual` are `[T, n]`. `residual` is contiguous. The result is as for `rms_norm`.
    """
    assert residual.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    _launch_norm(x, residual, weight, eps, out, x.shape[0], 1, x.stride(0), 0, has_residual=True, pdl=pdl)
    return out


def _launch_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    num_rows: int,
    inner: int,
    outer_stride: int,
    inner_stride: int,
    *,
    has_residual: bool,
    pdl: bool,
) -> None:
    assert x.stride(-1) == 1
    assert out.is_contiguous()
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    rows = max(1, _PROGRAM_ELEMENTS // block)
    if num_rows:
        _norm[(triton.cdiv(num_rows, rows),)](
            x, residual, weight, out, num_rows, inner, outer_stride, inner_stride, eps,
            SIZE=size, BLOCK=block, ROWS=rows, HAS_RESIDUAL=has_residual, PDL=pdl,
            num_warps=min(16, max(4, block * rows // 512)), **overlapping(pdl),
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _norm(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    inner: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Normalise `ROWS` rows. Row `r` of `x` starts at `r // inner * outer_stride + r % inner * inner_stride`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    is_stored = (row < num_rows)[:, None] & (column < SIZE)
    start = (row // inner).to(tl.int64) * outer_stride + (row % inner) * inner_stride
    place = row.to(tl.int64)[:, None] * SIZE + column
    # No kernel of a step writes the weight, so it can be read before the wait.
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + start[:, None] + column, mask=is_stored, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + place, mask=is_stored, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + place, rounded, mask=is_stored)
        x = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)
    tl.store(out_ptr + place, x * factor[:, None] * weight, mask=is_stored)


def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None, *, pdl: bool = False) -> torch.Tensor:
    """`gate * sigmoid(gate) * up` `[T, n]` from `gate_up` `[T, 2 * n]`, which contains gate, then up."""
    return _launch_gate(gate_up, out, is_gelu=False, pdl=pdl)


def gelu_and_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None, *, pdl: bool = False) -> torch.Tensor:
    """`gelu(gate) * up` `[T, n]` from `gate_up` `[T, 2 * n]`, with gelu in its tanh form, as in Gemma models."""
    return _launch_gate(gate_up, out, is_gelu=True, pdl=pdl)


def clamped_silu_and_mul(
    gate_up: torch.Tensor, alpha: float, limit: float, out: torch.Tensor | None = None, *, pdl: bool = False
) -> torch.Tensor:
    """`gate * sigmoid(alpha * gate) * (up + 1)` `[T, n]`, as in gpt-oss, from `gate_up` `[T, 2 * n]`.

    Beforehand, `gate` is clamped to `(-inf, limit]` and `up` is clamped to `[-limit, limit]`.
    """
    return _launch_gate(gate_up, out, is_gelu=False, alpha=alpha, limit=limit, pdl=pdl)


def _launch_gate(
    gate_up: torch.Tensor,
    out: torch.Tensor | None,
    *,
    is_gelu: bool,
    alpha: float = 1.0,
    limit: float = 0.0,
    pdl: bool,
) -> torch.Tensor:
    """Launch a gate. `limit` 0 means that nothing is clamped and that nothing is added to `up`."""
    assert gate_up.stride(-1) == 1
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, size), dtype=gate_up.dtype, device=gate_up.device) if out is None else out
    assert out.is_contiguous()
    block = min(_PROGRAM_ELEMENTS, triton.next_power_of_2(size))
    if num_rows:
        _gate[(num_rows, triton.cdiv(size, block))](
            gate_up, out, gate_up.stride(0), SIZE=size, BLOCK=block, IS_GELU=is_gelu, ALPHA=alpha, LIMIT=limit,
            PDL=pdl, num_warps=4, **overlapping(pdl),
        )  # fmt: skip
    return out


@triton.jit
def _gate(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_GELU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Compute `BLOCK` columns of one row. The grid is `(T, blocks)`.

    All gates are `gate * sigmoid(z) * up`, because `(1 + tanh(y)) / 2 = sigmoid(2 * y)`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_stored = column < SIZE
    if PDL:
        tl.extra.cuda.gdc_wait()
    gate = tl.load(gate_up_ptr + row * stride + column, mask=is_stored, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * stride + SIZE + column, mask=is_stored, other=0.0).to(tl.float32)
    if LIMIT > 0:
        # Unlike a minimum, a comparison leaves NaN unchanged.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1
    z = gate * ALPHA
    if IS_GELU:
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out_ptr + row * SIZE + column, gate * sigmoid(z) * up, mask=is_stored)
