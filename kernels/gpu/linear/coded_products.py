"""Products with 8-bit and 4-bit weights on a GPU. The weights are read in quantised form and decoded in registers.

A program turns codes into values, multiplies them on tensor cores, and multiplies the sums of each group of inputs by
its scales. Values are therefore rounded to the dtype of `x` before they are scaled. This is exact for FP8 and for
integers of at most 8 bits. If the weight has minima, a second product, with ones, sums the inputs of each group, and is
multiplied by the group's minima. The weight is the first operand of each product, because only the first can stay in
registers. Launches depend only on shapes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from loramux.kernels.gpu.linear.code_values import format_of, values_of
from loramux.kernels.gpu.linear.coded_weights import CodedWeights
from loramux.kernels.routing import Routing

TILE_ROWS = (16, 32, 64)
"""Possible numbers of rows per tile. With more rows than the largest tile has, there are several tiles, and each
decodes the weight.
"""

LARGE_STEP_ROWS = 128
"""Number of rows of a large tile, and minimum number of rows for which products use large tiles."""

TARGET_PROGRAMS = 256
"""If a product has fewer programs than this, several programs share the inputs of a tile. Two programs per
multiprocessor hide latencies (measured on an H100).
"""

MAX_SPLITS = 8
SUM_BLOCK = 1024
"""Maximum number of columns that a program of `_sum_splits` computes."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Compile-time parameters of a product. A program computes `rows` rows and `columns` columns, and multiplies up to
    `max_step` inputs at a time.
    """

    rows: int
    columns: int
    max_step: int
    num_warps: int
    num_stages: int

    def num_splits(self, num_rows: int, num_columns: int, num_steps: int) -> int:
        """Number of programs that share the `num_steps` steps of a tile. Each program has at least one step."""
        programs = triton.cdiv(num_rows, self.rows) * triton.cdiv(num_columns, self.columns)
        most = min(MAX_SPLITS, triton.next_power_of_2(triton.cdiv(TARGET_PROGRAMS, programs)))
        return triton.cdiv(num_steps, triton.cdiv(num_steps, most))

    def step(self, weights: CodedWeights) -> int:
        """Number of bytes of codes that a program loads at a time for each output."""
        return min(weights.step, self.max_step)

    def num_steps(self, weights: CodedWeights) -> int:
        return triton.cdiv(weights.codes.shape[2], self.step(weights))


def tiling_of(num_rows: int, itemsize: int) -> Tiling:
    """The tiling for `num_rows` rows with elements of `itemsize` bytes.

    The number of stages is limited so that the stages fit into the shared memory of every supported GPU.
    """
    if num_rows >= LARGE_STEP_ROWS:
        return Tiling(LARGE_STEP_ROWS, 128, 64, 8, 1 if itemsize == 4 else 3)
    rows = next((rows for rows in TILE_ROWS if rows >= num_rows), TILE_ROWS[-1])
    return Tiling(rows, 64, 128, 4, 2 if itemsize == 4 else 4)


def multiply_codes(x: torch.Tensor, weights: CodedWeights) -> torch.Tensor:
    """`y = x @ weightᵀ + bias` for `x` `[T, in_features]` and the weight of one linear layer."""
    assert weights.codes.shape[0] == 1
    num_rows = x.shape[0]
    y = torch.empty(num_rows, weights.out_features, dtype=x.dtype, device=x.device)
    tiling = tiling_of(num_rows, x.dtype.itemsize)
    num_splits = tiling.num_splits(max(1, num_rows), weights.out_features, tiling.num_steps(weights))
    if num_splits == 1:
        _launch(x, weights, y, None)
        return y
    parts = torch.empty(num_splits, *y.shape, dtype=torch.float32, device=x.device)
    _launch(x, weights, parts, None)
    _sum_splits[num_rows, triton.cdiv(y.shape[1], SUM_BLOCK)](
        parts, parts if weights.bias is None else weights.bias, y, num_splits, y.numel(),
        OUT=y.shape[1], BLOCK=min(SUM_BLOCK, triton.next_power_of_2(y.shape[1])), HAS_BIAS=weights.bias is not None,
        num_warps=4,
    )  # fmt: skip
    return y


def multiply_coded_experts(x: torch.Tensor, weights: CodedWeights, routing: Routing) -> torch.Tensor:
    """`experts.multiply_experts` for quantised weights."""
    y = torch.empty(routing.num_pairs, weights.out_features, dtype=x.dtype, device=x.device)
    _launch(x, weights, y, routing)
    return y


def _launch(x: torch.Tensor, weights: CodedWeights, y: torch.Tensor, routing: Routing | None) -> None:
    """Launch the product. If `y` is `[splits, T, out_features]`, it receives partial sums without the bias."""
    assert x.stride(1) == 1
    # A token chooses an expert at most once, so no expert has more rows than there are tokens.
    num_rows = x.shape[0] if routing is None else routing.experts.shape[0]
    if not num_rows:
        return
    codes, is_split = weights.codes, y.ndim == 3
    # Experts use the tiling for the mean number of rows per expert.
    mean_rows = num_rows if routing is None else triton.cdiv(routing.num_pairs, codes.shape[0])
    tiling = tiling_of(mean_rows, x.dtype.itemsize)
    num_splits = y.shape[0] if is_split else 1
    grid = (
        triton.cdiv(weights.out_features, tiling.columns),
        triton.cdiv(num_rows, tiling.rows),
        num_splits if routing is None else codes.shape[0],
    )
    # The kernel does not read the tensors that stand in for absent ones.
    zeros, minima, bias = (codes if one is None else one for one in (weights.zeros, weights.minima, weights.bias))
    pairs, starts = (codes, codes) if routing is None else (routing.pairs, routing.starts)
    step = tiling.step(weights)
    _multiply_codes[grid](
        x, codes, weights.scales, zeros, minima, bias, y, pairs, starts, num_rows, x.stride(0),
        triton.cdiv(tiling.num_steps(weights), num_splits) * step,
        HAS_MINIMA=weights.minima is not None, HAS_BIAS=weights.bias is not None and not is_split,
        HAS_ROUTING=routing is not None, IS_SPLIT=is_split,
        PAIRS_PER_ROW=1 if routing is None else routing.pairs_per_row(x), IN=weights.in_features,
        OUT=weights.out_features, GROUP=weights.group, NUM_BYTES=codes.shape[2], STEP=step, ROWS=tiling.rows,
        BLOCK_N=tiling.columns, **format_of(weights, x.dtype),
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip


@triton.jit
def _multiply_codes(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    minima_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    starts_ptr: tl.tensor,
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    split_bytes: tl.tensor,
    HAS_MINIMA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ROUTING: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_BYTES: tl.constexpr,
    STEP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
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
    """Multiply ROWS rows, or pairs of one expert, by BLOCK_N columns. The grid is `(columns, tiles of rows, experts)`.

    With `IS_SPLIT`, the third axis of the grid divides the bytes of each output instead: `split_bytes` for each
    program. `STEP` bytes of an output contain the codes of `STEP` inputs, or of twice as many inputs for 4 bits.
    """
    third = tl.program_id(2)
    expert = third * HAS_ROUTING
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
    x_row = x_ptr + (row // PAIRS_PER_ROW * x_stride)[None, :]
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < OUT
    output = expert.to(tl.int64) * OUT + column
    inner = tl.arange(0, STEP)
    STEPS: tl.constexpr = 8 // BITS
    NUM_GROUPS: tl.constexpr = IN // GROUP
    IS_WHOLE: tl.constexpr = NUM_BYTES % STEP == 0 and IN == NUM_BYTES * STEPS
    # All inputs of one load share their scales.
    IS_IN_GROUP: tl.constexpr = GROUP % (STEP * STEPS) == 0
    y = tl.zeros((BLOCK_N, ROWS), tl.float32)
    sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
    ones = tl.full((BLOCK_N, STEP), 1.0, DOT_DTYPE)
    zero = tl.full((BLOCK_N, 1), ZERO, tl.float32)
    first_byte = 0
    last_byte = NUM_BYTES
    if IS_SPLIT:
        first_byte = third * split_bytes
        last_byte = tl.minimum(first_byte + split_bytes, NUM_BYTES)
    for at in tl.range(first_byte, last_byte, STEP):
        is_byte = is_column[:, None]
        if not IS_WHOLE:
            is_byte &= (at + inner < NUM_BYTES)[None, :]
        packed = tl.load(codes_ptr + output[:, None] * NUM_BYTES + (at + inner)[None, :], mask=is_byte, other=0)
        total = tl.zeros((BLOCK_N, ROWS), tl.float32)
        if NUM_GROUPS > 1:
            sums = tl.zeros((BLOCK_N, ROWS), tl.float32)
        for part in tl.static_range(STEPS):
            k = at * STEPS + part * STEP
            group = output * NUM_GROUPS + k // GROUP
            # If the number of groups is odd, the last block has no second half.
            is_group = is_column & (k < IN)
            if HAS_ZEROS:
                zero = tl.load(zeros_ptr + group, mask=is_group, other=0).to(tl.float32)[:, None]
            value = values_of(packed, zero, part, KIND, BITS, TABLE, TEXTS, PACK, OFFSET, ZERO, HAS_ZEROS, DOT_DTYPE)
            is_x = is_row[None, :]
            if not IS_WHOLE:
                is_x &= (k + inner < IN)[:, None]
            x = tl.load(x_row + (k + inner)[:, None], mask=is_x, other=0.0).to(DOT_DTYPE)
            if NUM_GROUPS == 1:
                y = tl.dot(value, x, y, input_precision="tf32x3")
            elif IS_IN_GROUP:
                total = tl.dot(value, x, total, input_precision="tf32x3")
            else:
                scale = tl.load(scales_ptr + group, mask=is_group, other=0.0).to(tl.float32)
                y += tl.dot(value, x, input_precision="tf32x3") * scale[:, None]
            if HAS_MINIMA:
                if NUM_GROUPS == 1 or IS_IN_GROUP:
                    sums = tl.dot(ones, x, sums, input_precision="tf32x3")
                else:
                    minimum = tl.load(minima_ptr + group, mask=is_group, other=0.0).to(tl.float32)
                    y += tl.dot(ones, x, input_precision="tf32x3") * minimum[:, None]
        if NUM_GROUPS > 1 and IS_IN_GROUP:
            group = output * NUM_GROUPS + at * STEPS // GROUP
            y += total * tl.load(scales_ptr + group, mask=is_column, other=0.0).to(tl.float32)[:, None]
            if HAS_MINIMA:
                y += sums * tl.load(minima_ptr + group, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if NUM_GROUPS == 1:
        y *= tl.load(scales_ptr + output, mask=is_column, other=0.0).to(tl.float32)[:, None]
        if HAS_MINIMA:
            y += sums * tl.load(minima_ptr + output, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        y += tl.load(bias_ptr + output, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if IS_SPLIT:
        row += third.to(tl.int64) * num_rows
    tl.store(y_ptr + row[None, :] * OUT + column[:, None], y, mask=is_row[None, :] & is_column[:, None])


@triton.jit(do_not_specialize=["num_splits"])
def _sum_splits(
    parts_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_splits: tl.tensor,
    split_stride: tl.tensor,
    OUT: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Sum the partial results of `_multiply_codes` in order and add the bias. The grid is `(T, blocks of columns)`."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < OUT
    place = tl.program_id(0).to(tl.int64) * OUT + column
    part = parts_ptr + place
    y = tl.zeros((BLOCK,), tl.float32)
    for _ in range(num_splits):
        y += tl.load(part, mask=is_column, other=0.0)
        part += split_stride
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, y, mask=is_column)
