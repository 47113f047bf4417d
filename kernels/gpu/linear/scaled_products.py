"""Products of FP8 weights and inputs in steps of many rows: the rows of `x` are rounded to FP8, and torch multiplies.

`torch._scaled_mm` multiplies FP8 numbers at twice the rate of bfloat16, and the weight is read as it is stored. Its
layouts of scales are those of cuBLAS ("Scaling Factors Layouts" in the documentation of cublasLtMatmul). Only the base
reads the rounded rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from loramux.kernels.gpu.linear.coded_weights import CodedWeights
from loramux.kernels.quantized import CodeKind, QuantizedWeight

LARGEST = tl.constexpr(448.0)
"""Largest E4M3 number."""

LEAST_SCALE = tl.constexpr(2.0**-100)
"""Smallest scale of a row, so that no division by it overflows. Rows of numbers below it round to 0."""

SCALE_BLOCK = 128
"""Number of inputs, and of outputs, that share a scale if a weight is scaled in blocks."""

SCALES_PER_LINE = 4
"""Number of scales in 16 bytes. Blocked scales are read in lines of this size, so other numbers are not supported."""

ROW_MULTIPLE = 16
"""Products have a multiple of this number of rows. The rows added are not initialised, and their results are dropped.
"""

_PROGRAM_ELEMENTS = 4096
"""Number of elements that a program rounds at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class ScaledWeight:
    """An FP8 weight, as `torch._scaled_mm` reads it.

    `codes` float8_e4m3fn is `[out_features, in_features]`. `scales` float32 is `[1, out_features]`, or
    `[in_features / 128, out_features / 128]` with blocks. `bias` is `[out_features]` or None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    @property
    def num_groups(self) -> int:
        """Number of scales that each row of inputs has."""
        return self.scales.shape[0]


def scaled_weight(weight: QuantizedWeight, placed: CodedWeights) -> ScaledWeight | None:
    """`weight`, whose codes are in `placed`, or None if torch cannot multiply it by FP8 inputs on this device.

    torch supports FP8 weights with one scale per output and, with some versions of CUDA, in blocks of 128 x 128. It
    needs a GPU of compute capability 8.9 or later, and sizes that are multiples of 16.
    """
    scales = _scales_of(weight)
    if placed.kind is not CodeKind.E4M3 or scales is None:
        return None
    device = placed.codes.device
    bias = None if placed.bias is None else placed.bias[0]
    scaled = ScaledWeight(placed.codes[0].view(torch.float8_e4m3fn), scales.to(device), bias)
    # Which sizes and layouts are supported depends on the versions of torch and CUDA and on the GPU, so try it.
    rows = torch.zeros(ROW_MULTIPLE, weight.in_features, dtype=torch.float8_e4m3fn, device=device)
    row_scales = _empty_scales(ROW_MULTIPLE, scaled.num_groups, device).fill_(1.0)
    try:
        _multiply(rows, row_scales, scaled, torch.bfloat16 if bias is None else bias.dtype)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError):
        return None
    return scaled


def _scales_of(weight: QuantizedWeight) -> torch.Tensor | None:
    scales = torch.from_numpy(weight.scales)
    num_groups = scales.shape[1]
    if num_groups == 1:
        return scales.T.contiguous()
    if weight.group != SCALE_BLOCK or num_groups % SCALES_PER_LINE or weight.out_features % SCALE_BLOCK:
        return None
    blocks = scales.view(-1, SCALE_BLOCK, num_groups)
    first = blocks[:, :1]
    return first[:, 0].contiguous().T if bool((blocks == first).all()) else None


def multiply_scaled(x: torch.Tensor, weight: ScaledWeight) -> torch.Tensor:
    """`y = round(x) @ weightᵀ + bias` for `x` `[T, in_features]`, where `round` is `round_rows`. Sums are float32."""
    return _multiply(*round_rows(x, weight.num_groups), weight, x.dtype)[: x.shape[0]]


def _multiply(rows: torch.Tensor, row_scales: torch.Tensor, weight: ScaledWeight, dtype: torch.dtype) -> torch.Tensor:
    return torch._scaled_mm(rows, weight.codes.T, row_scales, weight.scales, bias=weight.bias, out_dtype=dtype)


def round_rows(x: torch.Tensor, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Round `x` `[T, n]` to FP8, with a scale for each of `num_groups` equal parts of a row.

    Returns float8_e4m3fn `[P, n]` and float32 scales `[P, num_groups]`, where P is T rounded up to a multiple of
    ROW_MULTIPLE. Consecutive rows of a column of scales are adjacent in memory. The largest magnitude of a part becomes
    448. Parts with NaN or infinity contain NaN.
    """
    assert x.stride(1) == 1
    assert x.shape[1] % num_groups == 0
    num_rows = triton.cdiv(x.shape[0], ROW_MULTIPLE) * ROW_MULTIPLE
    codes = torch.empty(num_rows, x.shape[1], dtype=torch.uint8, device=x.device)
    scales = _empty_scales(num_rows, num_groups, x.device)
    size, num_parts = x.shape[1] // num_groups, x.shape[0] * num_groups
    block = min(_PROGRAM_ELEMENTS, triton.next_power_of_2(size))
    parts = _PROGRAM_ELEMENTS // block
    if num_parts:
        _round_rows[(triton.cdiv(num_parts, parts),)](
            x, codes, scales, num_parts, x.stride(0), num_rows, NUM_GROUPS=num_groups, SIZE=size, BLOCK=block,
            PARTS=parts, num_warps=8,
        )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), scales


def _empty_scales(num_rows: int, num_groups: int, device: torch.device) -> torch.Tensor:
    stride = 1 if num_groups == 1 else num_rows
    return torch.empty_strided((num_rows, num_groups), (1, stride), dtype=torch.float32, device=device)


@triton.jit(do_not_specialize=["num_parts"])
def _round_rows(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_parts: tl.tensor,
    x_stride: tl.tensor,
    scale_stride: tl.tensor,
    NUM_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Round PARTS parts of rows, each of SIZE elements. Part `p` is part `p % NUM_GROUPS` of row `p // NUM_GROUPS`."""
    part = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    is_part = part < num_parts
    row = (part // NUM_GROUPS).to(tl.int64)
    group = part % NUM_GROUPS
    inner = tl.arange(0, BLOCK)[None, :]
    x_part = x_ptr + (row * x_stride + group * SIZE)[:, None]
    codes_part = codes_ptr + (row * (NUM_GROUPS * SIZE) + group * SIZE)[:, None]
    largest = tl.zeros((PARTS,), tl.float32)
    # The second pass over a part finds it in the L1 cache.
    for at in tl.range(0, SIZE, BLOCK):
        is_stored = is_part[:, None] & (at + inner < SIZE)
        x = tl.load(x_part + at + inner, mask=is_stored, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(x), 1))
    scale = tl.maximum(largest / LARGEST, LEAST_SCALE)
    tl.store(scales_ptr + group * scale_stride + row, scale, mask=is_part)
    for at in tl.range(0, SIZE, BLOCK):
        is_stored = is_part[:, None] & (at + inner < SIZE)
        x = tl.load(x_part + at + inner, mask=is_stored, other=0.0).to(tl.float32)
        tl.store(codes_part + at + inner, _e4m3_code(x / scale[:, None]), mask=is_stored)


@triton.jit
def _e4m3_code(x: tl.tensor) -> tl.tensor:
    """The E4M3 number nearest to the float32 `x`, as uint8. Ties round to even, and NaN stays NaN.

    Triton converts to E4M3 only on GPUs of compute capability 8.9 or later, and its interpreter rounds wrongly.
    """
    size = tl.abs(x)
    # Unlike a minimum, a comparison leaves NaN unchanged.
    size = tl.where(size > LARGEST, LARGEST, size)
    bits = size.to(tl.int32, bitcast=True)
    # Keep 3 of the 23 bits of the mantissa, and change the bias of the exponent from 127 to 7.
    code = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Numbers below 2**-6 are multiples of 2**-9, which is what the lowest bit of a float32 is worth at 2**14.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, code)
    code = tl.where(size == size, code, 0x7F)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)
