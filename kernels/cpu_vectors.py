"""Eight float32 lanes as a numba value, so that a kernel decides what is vectorised and stays in registers.

LLVM's own vectoriser gives up on most loops of these kernels (accumulators that survive an outer loop, bfloat16
widened from integers, stores that might overlap loads). Arrays of float32, and of uint16 whose elements are bfloat16
bits, load as float32 lanes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.extending import register_model
from numba.np.arrayobj import make_array

from loramux.kernels.compiled import exact, helper, intrinsic

LANES = 8
"""Every length that kernels step through in lanes is a multiple of 8: head_dim, page tokens and chunks."""

_FLOAT = ir.FloatType()
_INT = ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, LANES)
_CONTRACT = ("contract",)


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name="float32x8")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, frontend_type: Any) -> None:
        super().__init__(manager, frontend_type, _VECTOR)


_lanes = _Lanes()


def emit_splat(builder: Any, scalar: Any, count: int = LANES) -> Any:
    """A float32 in each of `count` lanes."""
    first = builder.insert_element(ir.Constant(ir.VectorType(_FLOAT, count), ir.Undefined), scalar, _INT(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_INT, count), [0] * count))


def emit_load(builder: Any, pointer: Any, dtype: Any, count: int = LANES) -> Any:
    """`count` elements as float32 lanes: float32 themselves, or the bfloat16 that the bits of uint16 are."""
    if dtype == types.float32:
        return builder.load(builder.bitcast(pointer, ir.VectorType(_FLOAT, count).as_pointer()), align=4)
    halves = builder.load(builder.bitcast(pointer, ir.VectorType(ir.IntType(16), count).as_pointer()), align=2)
    wide = builder.zext(halves, ir.VectorType(_INT, count))
    return builder.bitcast(builder.shl(wide, ir.Constant(wide.type, [16] * count)), ir.VectorType(_FLOAT, count))


def emit_multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c` of lanes, in one instruction where the CPU has it."""
    return builder.fadd(builder.fmul(a, b, flags=_CONTRACT), c, flags=_CONTRACT)


def _element_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(make_array(array_type)(context, builder, array).data, [index])


@intrinsic
def zeros(typing_context: Any) -> Any:
    """Eight lanes of 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return ir.Constant(_VECTOR, [0.0] * LANES)

    return _lanes(), generate


@intrinsic
def load(typing_context: Any, array: Any, index: Any) -> Any:
    """Lanes `array[index:index + 8]` of a contiguous array, without a check of bounds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_load(builder, _element_pointer(context, builder, array, args[0], args[1]), array.dtype)

    return _lanes(array, types.intp), generate


@intrinsic
def store(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """`array[index:index + 8] = value` of a contiguous float32 array, without a check of bounds."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element_pointer(context, builder, array, args[0], args[1])
        builder.store(args[2], builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.none(array, types.intp, _lanes), generate


@intrinsic
def multiply_add(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """`a * b + c`, where `a` is lanes or a scalar for all lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        factor = args[0] if a == _lanes else emit_splat(builder, args[0])
        return emit_multiply_add(builder, factor, args[1], args[2])

    return _lanes(_lanes if a == _lanes else types.float32, _lanes, _lanes), generate


@intrinsic
def float_bits(typing_context: Any, value: Any) -> Any:
    """The bits of a float32, as int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _INT)

    return types.int32(types.float32), generate


@intrinsic
def float_of_bits(typing_context: Any, bits: Any) -> Any:
    """The float32 that has these int32 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _FLOAT)

    return types.float32(types.int32), generate


@intrinsic
def widen(typing_context: Any, value: Any) -> Any:
    """An element of an array as float32: a float32 itself, or the bfloat16 that a uint16's bits are."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if value == types.float32:
            return args[0]
        wide = builder.zext(args[0], _INT)
        return builder.bitcast(builder.shl(wide, ir.Constant(_INT, 16)), _FLOAT)

    return types.float32(value), generate


@intrinsic
def narrow(typing_context: Any, array: Any, value: Any) -> Any:
    """A float32 as an element of `array`: itself, or the bits of the nearest bfloat16, ties to even; NaN stays NaN."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if array.dtype == types.float32:
            return args[1]
        bits = builder.bitcast(args[1], _INT)
        is_odd = builder.and_(builder.lshr(bits, _INT(16)), _INT(1))
        rounded = builder.lshr(builder.add(builder.add(bits, _INT(0x7FFF)), is_odd), _INT(16))
        is_nan = builder.icmp_unsigned(">", builder.and_(bits, _INT(0x7FFFFFFF)), _INT(0x7F800000))
        return builder.trunc(builder.select(is_nan, _INT(0x7FC0), rounded), ir.IntType(16))

    return array.dtype(array, types.float32), generate


@intrinsic
def _pointer_at(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@helper
def floats_at(address: int) -> Any:
    """The float32 from a memory address on, as a contiguous array without an end.

    Kernels take activations by address and row stride: views of wider rows cost no copy, and there is one compiled
    form whatever the strides.
    """
    return carray(_pointer_at(address), (1 << 48,), np.float32)


@exact
def exponential(x: np.float32) -> np.float32:
    """`exp(x)` to about one unit in the last place, of `x` cut to `[-87, 88]`; NaN stays NaN.

    Plain arithmetic (after Cephes' expf), so that a loop of it vectorises where a call would not.
    """
    if x < np.float32(-87.0):
        x = np.float32(-87.0)
    if x > np.float32(88.0):
        x = np.float32(88.0)
    # Adding 1.5 * 2**23 rounds to an integer n, which is then in the low bits.
    shifted = x * np.float32(1.4426950408889634) + np.float32(12582912.0)
    n = shifted - np.float32(12582912.0)
    fraction = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    y = np.float32(1.9875691500e-4)
    y = y * fraction + np.float32(1.3981999507e-3)
    y = y * fraction + np.float32(8.3334519073e-3)
    y = y * fraction + np.float32(4.1665795894e-2)
    y = y * fraction + np.float32(1.6666665459e-1)
    y = y * fraction + np.float32(5.0000001201e-1)
    y = y * fraction * fraction + fraction + np.float32(1.0)
    # The low 9 bits of the shifted sum, moved into the exponent, are the factor 2**n.
    return float_of_bits(np.int32(float_bits(y) + (float_bits(shifted) << np.int32(23))))
