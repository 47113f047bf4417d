"""Products with 8-bit and 4-bit weights on a GPU, which read only the bytes of their codes and scales.

A program turns codes into values in registers, multiplies them on tensor cores, and multiplies the sums of each group
of inputs by its scales. Values are therefore rounded to the dtype of `x` before they are scaled: integers and FP8 are
exact in every dtype. Every launch depends on shapes only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from loramux.kernels.gpu.addresses import dot_dtype
from loramux.kernels.gpu.coded_weights import CodedWeights
from loramux.kernels.quantized import CodeKind
from loramux.kernels.routing import Routing

FEW_ROWS, MANY_ROWS = 16, 64
"""Rows per tile: the minimum for tensor cores, and the number for steps with many rows."""

FEW_COLUMNS, MANY_COLUMNS = 32, 128
"""Columns per tile. Narrow tiles let a decode step, which has one tile of rows, use all multiprocessors."""

LARGE_STEP_ROWS = 128
"""Minimum number of rows for which products use large tiles."""

KINDS = (CodeKind.INTEGERS, CodeKind.E4M3, CodeKind.TABLE)
"""The kinds of codes that a program can be compiled for."""


def multiply_codes(x: torch.Tensor, weights: CodedWeights) -> torch.Tensor:
    """`y = x @ weightᵀ + bias` for `x` `[T, in_features]` and the weight of one linear layer."""
    assert weights.codes.shape[0] == 1
    y = torch.empty(x.shape[0], weights.out_features, dtype=x.dtype, device=x.device)
    _launch(x, weights, y, None)
    return y


def multiply_coded_experts(x: torch.Tensor, weights: CodedWeights, routing: Routing) -> torch.Tensor:
    """`experts.multiply_experts` for quantised weights."""
    y = torch.empty(routing.num_pairs, weights.out_features, dtype=x.dtype, device=x.device)
    _launch(x, weights, y, routing)
    return y


def _launch(x: torch.Tensor, weights: CodedWeights, y: torch.Tensor, routing: Routing | None) -> None:
    assert x.stride(1) == 1
    # A token has an expert at most once, so no expert has more rows than there are tokens.
    num_rows = x.shape[0] if routing is None else routing.experts.shape[0]
    if not num_rows:
        return
    codes = weights.codes
    is_large = num_rows >= LARGE_STEP_ROWS
    # Three stages of large float32 tiles do not fit into the shared memory of every GPU.
    num_large_stages = 3 if x.dtype.itemsize == 2 else 1
    rows, columns = (MANY_ROWS, MANY_COLUMNS) if is_large else (FEW_ROWS, FEW_COLUMNS)
    grid = triton.cdiv(weights.out_features, columns), triton.cdiv(num_rows, rows), codes.shape[0]
    # The kernel does not read absent tensors.
    zeros, table, bias = (codes if one is None else one for one in (weights.zeros, weights.table, weights.bias))
    pairs, starts = (codes, codes) if routing is None else (routing.pairs, routing.starts)
    _multiply_codes[grid](
        x, codes, weights.scales, zeros, table, bias, y, pairs, starts, num_rows, x.stride(0),
        KIND=KINDS.index(weights.kind), BITS=weights.bits, ZERO=weights.zero, HAS_ZEROS=weights.zeros is not None,
        HAS_BIAS=weights.bias is not None, HAS_ROUTING=routing is not None,
        PAIRS_PER_ROW=1 if routing is None else routing.pairs_per_row(x), IN=weights.in_features,
        OUT=weights.out_features, GROUP=weights.group, NUM_BYTES=codes.shape[2], STEP=weights.step, ROWS=rows,
        BLOCK_N=columns, DOT_DTYPE=dot_dtype(x.dtype, x.dtype), num_warps=8 if is_large else 4,
        num_stages=num_large_stages if is_large else 6,
    )  # fmt: skip


@triton.jit
def _values(
    codes: tl.tensor,
    base: tl.tensor,
    table_ptr: tl.tensor,
    KIND: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
) -> tl.tensor:
    """The values of codes of the kind `KINDS[KIND]`. `base` is 2**23 plus the zero points of integers."""
    if KIND == 0:
        # These are the bits of the float32 2**23 + code, because the lowest bit of a float32 is worth 1 there.
        value = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - base
    elif KIND == 1:
        bits = codes.to(tl.int16)
        value = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        value = tl.load(table_ptr + codes.to(tl.int32))
    return value.to(DOT_DTYPE)


@triton.jit
def _multiply_codes(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    table_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ROUTING: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
) -> None:
    """Multiply ROWS rows, or pairs of one expert, by BLOCK_N columns; grid `(columns, tiles of rows, experts)`.

    Each load of `STEP` bytes of an output is one step of `STEP` inputs, or two for 4 bits.
    """
    expert = tl.program_id(2)
    listed = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    end = num_rows
    if HAS_ROUTING:
        begin = tl.load(starts_ptr + expert)
        end = tl.load(starts_ptr + expert + 1)
        if begin + tl.program_id(1) * ROWS >= end:
            return
        listed += begin
    is_row = listed < end
    row = listed.to(tl.int64)
    if HAS_ROUTING:
        row = tl.load(pairs_ptr + listed, mask=is_row, other=0).to(tl.int64)
    x_row = x_ptr + (row // PAIRS_PER_ROW * x_stride)[:, None]
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < OUT
    output = expert.to(tl.int64) * OUT + column
    inner = tl.arange(0, STEP)
    STEPS: tl.constexpr = 8 // BITS
    NUM_GROUPS: tl.constexpr = IN // GROUP
    y = tl.zeros((ROWS, BLOCK_N), tl.float32)
    base = tl.full((BLOCK_N, 1), 8388608.0 + ZERO, tl.float32)
    for at in tl.range(0, NUM_BYTES, STEP):
        is_byte = is_column[:, None] & (at + inner < NUM_BYTES)[None, :]
        packed = tl.load(codes_ptr + output[:, None] * NUM_BYTES + (at + inner)[None, :], mask=is_byte, other=0)
        for part in tl.static_range(STEPS):
            k = at * STEPS + part * STEP
            codes = packed
            if BITS == 4:
                codes = (packed >> (4 * part)) & 15
            group = output * NUM_GROUPS + k // GROUP
            # The last block of an odd number of groups has no second half.
            is_group = is_column & (k < IN)
            if HAS_ZEROS:
                base = 8388608.0 + tl.load(zeros_ptr + group, mask=is_group, other=0).to(tl.float32)[:, None]
            value = _values(codes, base, table_ptr, KIND, DOT_DTYPE)
            x = tl.load(x_row + (k + inner)[None, :], mask=is_row[:, None] & (k + inner < IN)[None, :], other=0.0)
            if NUM_GROUPS == 1:
                y = tl.dot(x.to(DOT_DTYPE), tl.trans(value), y, input_precision="tf32x3")
            else:
                total = tl.dot(x.to(DOT_DTYPE), tl.trans(value), input_precision="tf32x3")
                scale = tl.load(scales_ptr + group, mask=is_group, other=0.0).to(tl.float32)
                y += total * scale[None, :]
    if NUM_GROUPS == 1:
        y *= tl.load(scales_ptr + output, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + output, mask=is_column, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + row[:, None] * OUT + column[None, :], y, mask=is_row[:, None] & is_column[None, :])
