"""Products with quantised weights in steps of many rows: the weight is dequantised, and cuBLAS multiplies by it.

A fused product of many rows decodes the weight once per tile of rows, and its tiles are slower than cuBLAS.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from loramux.kernels.gpu.linear.code_values import format_of, values_of
from loramux.kernels.gpu.linear.coded_weights import CodedWeights

MAX_BYTES = 256 << 20
"""Maximum size, in bytes, of the part of a weight that is dequantised at a time. Products with small parts are much
slower.
"""

BLOCK_N = 16
"""Number of outputs that a program dequantises at a time."""


def multiply_dequantized(x: torch.Tensor, weights: CodedWeights) -> torch.Tensor:
    """`y = x @ weightᵀ + bias` for `x` `[T, in_features]` and the weight of one linear layer."""
    y = torch.empty(x.shape[0], weights.out_features, dtype=x.dtype, device=x.device)
    for columns, weight in _parts(weights, x.dtype):
        if weights.bias is None:
            torch.mm(x, weight.T, out=y[:, columns])
        else:
            torch.addmm(weights.bias[0, columns], x, weight.T, out=y[:, columns])
    return y


def add_dequantized(x: torch.Tensor, weights: CodedWeights, y: torch.Tensor) -> None:
    """`y += x @ weightᵀ` for `x` `[T, in_features]` and the weight of one linear layer without a bias."""
    assert weights.bias is None
    for columns, weight in _parts(weights, x.dtype):
        y[:, columns].addmm_(x, weight.T)


def _parts(weights: CodedWeights, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
    """The columns of `y` that are computed at a time, with their dequantised weight."""
    assert weights.codes.shape[0] == 1
    num_columns = max(BLOCK_N, MAX_BYTES // (weights.in_features * dtype.itemsize))
    for part in range(0, weights.out_features, num_columns):
        columns = slice(part, min(part + num_columns, weights.out_features))
        yield columns, _dequantize(weights, columns, dtype)


def _dequantize(weights: CodedWeights, columns: slice, dtype: torch.dtype) -> torch.Tensor:
    """Rows `columns` of the weight, `[num_columns, in_features]`, rounded to `dtype`."""
    num_columns = columns.stop - columns.start
    weight = torch.empty(num_columns, weights.in_features, dtype=dtype, device=weights.codes.device)
    num_bytes, step = weights.codes.shape[2], weights.step
    # The kernel does not read the tensors that stand in for absent ones.
    zeros, minima = (weights.codes if one is None else one for one in (weights.zeros, weights.minima))
    _dequantize_codes[triton.cdiv(num_columns, BLOCK_N), triton.cdiv(num_bytes, step)](
        weights.codes, weights.scales, zeros, minima, weight, columns.start, columns.stop,
        IN=weights.in_features, GROUP=weights.group, NUM_BYTES=num_bytes, STEP=step, BLOCK_N=BLOCK_N,
        HAS_MINIMA=weights.minima is not None, **format_of(weights, dtype), num_warps=4,
    )  # fmt: skip
    return weight


@triton.jit(do_not_specialize=["first", "end"])
def _dequantize_codes(
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_MINIMA: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    TEXTS: tl.constexpr,
    PACK: tl.constexpr,
    OFFSET: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
) -> None:
    """Dequantise STEP bytes of BLOCK_N outputs from `first` on. The grid is `(columns, bytes)`."""
    place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    output = (first + place).to(tl.int64)
    is_column = output < end
    inner = tl.arange(0, STEP)
    byte = tl.program_id(1) * STEP + inner
    STEPS: tl.constexpr = 8 // BITS
    NUM_GROUPS: tl.constexpr = IN // GROUP
    is_byte = is_column[:, None]
    if NUM_BYTES % STEP:
        is_byte &= (byte < NUM_BYTES)[None, :]
    packed = tl.load(codes_ptr + output[:, None] * NUM_BYTES + byte[None, :], mask=is_byte, other=0)
    zero = tl.full((BLOCK_N, 1), ZERO, tl.float32)
    for part in tl.static_range(STEPS):
        k = (tl.program_id(1) * STEPS + part) * STEP
        group = output * NUM_GROUPS + k // GROUP
        # If the number of groups is odd, the last block has no second half.
        is_group = is_column & (k < IN)
        if HAS_ZEROS:
            zero = tl.load(zeros_ptr + group, mask=is_group, other=0).to(tl.float32)[:, None]
        value = values_of(packed, zero, part, KIND, BITS, TABLE, TEXTS, PACK, OFFSET, ZERO, HAS_ZEROS, DOT_DTYPE)
        scale = tl.load(scales_ptr + group, mask=is_group, other=0.0).to(tl.float32)
        weight = value.to(tl.float32) * scale[:, None]
        if HAS_MINIMA:
            weight += tl.load(minima_ptr + group, mask=is_group, other=0.0).to(tl.float32)[:, None]
        at = weight_ptr + place.to(tl.int64)[:, None] * IN + (k + inner)[None, :]
        tl.store(at, weight, mask=is_column[:, None] & (k + inner < IN)[None, :])
