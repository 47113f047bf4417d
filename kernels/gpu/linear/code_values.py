"""Decodes the codes of quantised weights inside Triton kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from loramux.kernels.gpu.addresses import dot_dtype
from loramux.kernels.gpu.linear.code_decoding import decoding_of
from loramux.kernels.gpu.linear.coded_weights import CodedWeights
from loramux.kernels.quantized import CodeKind

KINDS = (CodeKind.INTEGERS, CodeKind.E4M3, CodeKind.TABLE)
"""The kinds of codes that a kernel can be compiled for."""


def format_of(weights: CodedWeights, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments that a kernel passes to `values_of`, for values in `dtype`."""
    operand = dot_dtype(dtype, dtype)
    decoding = None
    # Zero points of 8-bit codes can be too large for 16-bit values.
    if operand is not tl.float32 and (weights.zeros is None or weights.bits == 4):
        decoding = decoding_of(weights.kind, weights.bits, weights.table, dtype)
    return {
        "KIND": KINDS.index(weights.kind),
        "BITS": weights.bits,
        "TABLE": weights.table if decoding is None else None,
        "TEXTS": None if decoding is None else decoding.texts,
        "PACK": 0 if decoding is None else decoding.pack,
        "OFFSET": 0 if decoding is None else decoding.offset,
        "ZERO": weights.zero,
        "HAS_ZEROS": weights.zeros is not None,
        "DOT_DTYPE": operand,
    }


@triton.jit
def _pick4(is_odd: tl.tensor, is_upper: tl.tensor, TABLE: tl.constexpr, FIRST: tl.constexpr) -> tl.tensor:
    """One of the four values of `TABLE` from `FIRST` on."""
    upper = tl.where(is_odd, TABLE[FIRST + 3], TABLE[FIRST + 2])
    return tl.where(is_upper, upper, tl.where(is_odd, TABLE[FIRST + 1], TABLE[FIRST]))


@triton.jit
def values_of(
    packed: tl.tensor,
    zero: tl.tensor,
    PART: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    TABLE: tl.constexpr,
    TEXTS: tl.constexpr,
    PACK: tl.constexpr,
    OFFSET: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
) -> tl.tensor:
    """The values of codes of kind `KINDS[KIND]`, without scales. A 4-bit code is half `PART` of a byte.

    `zero` is the zero point of integers. It is `ZERO` unless `HAS_ZEROS`. E4M3 values are divided by `E4M3_FACTOR`.
    """
    if TEXTS is not None:
        registers: tl.constexpr = "=r,=r,r" if PACK == 4 else "=r,h"
        decoded = tl.inline_asm_elementwise(TEXTS[PART], registers, [packed], tl.int16, is_pure=True, pack=PACK)
        value = decoded.to(DOT_DTYPE, bitcast=True)
        if KIND == 0 and (HAS_ZEROS or ZERO + OFFSET != 0):
            value -= (zero + OFFSET).to(DOT_DTYPE)
    else:
        codes = packed
        if BITS == 4:
            codes = (packed >> (4 * PART)) & 15
        if KIND == 0:
            # These are the bits of the float32 2**23 + code, because the lowest bit of a float32 is worth 1 there.
            value = (codes.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (zero + 8388608.0)
        elif KIND == 1:
            bits = codes.to(tl.int16)
            value = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            # Selecting among constants by the bits of the codes is faster than reading the table once for each code.
            is_odd, is_upper, is_later = (codes & 1) != 0, (codes & 2) != 0, (codes & 4) != 0
            lower = tl.where(is_later, _pick4(is_odd, is_upper, TABLE, 4), _pick4(is_odd, is_upper, TABLE, 0))
            upper = tl.where(is_later, _pick4(is_odd, is_upper, TABLE, 12), _pick4(is_odd, is_upper, TABLE, 8))
            value = tl.where((codes & 8) != 0, upper, lower)
    return value.to(DOT_DTYPE)
