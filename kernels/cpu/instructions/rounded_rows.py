"""Activations rounded to 16 or 8 bits, for products with quantised weights.

The inputs of a row are divided into blocks. Each block has its own factor, so that its largest input becomes the
largest integer. The error of an input is therefore at most `1 / (2 * limit)` of the largest input in its block. With
the usual limit of 32767, this is less than the error of rounding the largest input to bfloat16. With 8 bits, the limit
is 127.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import prange, types

from loramux.kernels.cpu.instructions.blocks import emit_loop
from loramux.kernels.cpu.instructions.compiled import helper, intrinsic, kernel
from loramux.kernels.cpu.instructions.vectors import (
    PANEL,
    emit_halving,
    emit_multiply_add,
    emit_splat,
    float_of_bits,
    floats_at,
    integers_at,
)

SERIAL_ROUNDING = 100_000
"""Number of elements to round below which waking other threads costs more than it saves."""

_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _WORDS = (ir.VectorType(kind, PANEL) for kind in (_FLOAT, _INT))
INFINITY_BITS = 0x7F800000

_ROUNDING = 12582912.0
"""Adding 1.5 * 2**23 rounds a float32 to an integer and leaves the integer's 16 bits in the low half."""


@intrinsic
def bytes_of(typing_context: Any, kind: Any) -> Any:
    """Size in bytes of an element of `kind`, which is np.int16 or np.int8."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _LONG(kind.dtype.bitwidth // 8)

    return types.int64(kind), generate


@intrinsic
def _largest_bits(typing_context: Any, x: Any, size: Any) -> Any:
    """The largest `abs(x[k])`, as bits. The bits of infinity and NaN are larger than the bits of any finite number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = builder.inttoptr(args[0], _INT.as_pointer())

        def larger(a: Any, b: Any) -> Any:
            return builder.select(builder.icmp_signed(">", a, b), a, b)

        def step(k: Any, values: list[Any]) -> list[Any]:
            place = builder.bitcast(builder.gep(first, [k]), _WORDS.as_pointer())
            bits = builder.and_(builder.load(place, align=4), ir.Constant(_WORDS, [0x7FFFFFFF] * PANEL))
            return [larger(bits, values[0])]

        found = emit_loop(builder, args[1], PANEL, [ir.Constant(_WORDS, [0] * PANEL)], step)
        return emit_halving(builder, found[0], larger)

    return types.int32(types.int64, types.int64), generate


@intrinsic
def _round(typing_context: Any, x: Any, size: Any, factor: Any, out: Any, kind: Any) -> Any:
    """`out[k] = round(x[k] * factor)` as `kind`, ties to even. Return the sum of `out`. `size` is a multiple of 16."""
    element = ir.IntType(kind.dtype.bitwidth)
    elements = ir.VectorType(element, PANEL)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, size, factor, out, _ = args
        inputs, outputs = builder.inttoptr(x, _FLOAT.as_pointer()), builder.inttoptr(out, element.as_pointer())
        factors = emit_splat(builder, factor, PANEL)
        rounding = ir.Constant(_FLOATS, [_ROUNDING] * PANEL)

        def step(k: Any, values: list[Any]) -> list[Any]:
            lanes = builder.load(builder.bitcast(builder.gep(inputs, [k]), _FLOATS.as_pointer()), align=4)
            bits = builder.bitcast(emit_multiply_add(builder, lanes, factors, rounding), _WORDS)
            integers = builder.trunc(bits, elements)
            builder.store(integers, builder.bitcast(builder.gep(outputs, [k]), elements.as_pointer()), align=1)
            return [builder.add(values[0], builder.sext(integers, _WORDS))]

        found = emit_loop(builder, size, PANEL, [ir.Constant(_WORDS, [0] * PANEL)], step)
        return emit_halving(builder, found[0], builder.add)

    return types.int32(types.int64, types.int64, types.float32, types.int64, kind), generate


@helper
def round_row(x: int, num_blocks: int, block: int, limit: Any, rounded: int, kind: Any, factors: int) -> None:
    scales, sums = floats_at(factors), integers_at(factors)
    for b in range(num_blocks):
        inputs = x + 4 * block * b
        bits = _largest_bits(inputs, block)
        largest = float_of_bits(bits)
        scale, factor = largest / limit, limit / largest
        if not np.isfinite(factor):
            # Either all inputs are below 1e-34 in magnitude, so `limit / largest` is infinite, or one of them is NaN.
            scale, factor = np.float32(0), np.float32(0)
        if bits >= INFINITY_BITS:
            # The block contains infinity or NaN, so all outputs of the row become NaN.
            scale, factor = np.float32(np.nan), np.float32(0)
        sums[2 * b + 1] = _round(inputs, block, factor, rounded + bytes_of(kind) * block * b, kind)
        scales[2 * b] = scale


@kernel
def round_blocks(
    x: int, x_step: int, num_rows: int, num_blocks: int, block: int, limit: Any, rounded: int, rounded_step: int,
    kind: Any, factors: int, factor_step: int,
) -> None:  # fmt: skip
    """Round rows to `kind`, np.int16 or np.int8, in blocks of `block` inputs, a multiple of 16.

    The largest magnitude in a block becomes `limit`.

    `factors[t, b]` is a pair: the float32 factor that turns the integers back into inputs, and the int32 sum of the
    integers. `x`, `rounded` and `factors` are addresses, with steps in bytes. `limit` is a float32.
    """
    if num_rows * num_blocks * block < SERIAL_ROUNDING:
        for t in range(num_rows):
            rounded_row = rounded + t * rounded_step
            round_row(x + t * x_step, num_blocks, block, limit, rounded_row, kind, factors + t * factor_step)
    else:
        for t in prange(num_rows):
            rounded_row = rounded + t * rounded_step
            round_row(x + t * x_step, num_blocks, block, limit, rounded_row, kind, factors + t * factor_step)
