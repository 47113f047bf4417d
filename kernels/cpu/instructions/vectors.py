"""Sixteen float32 lanes as a numba value. Kernels use it to control vectorisation and the use of registers.

LLVM's own vectoriser gives up on most loops of these kernels, because of accumulators that outlive an inner loop,
bfloat16 widened from integers, or stores that might overlap loads. Arrays of float32, of bfloat16 bits as uint16, of
FP8 codes as uint8, and of int8 integers, load as float32 lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, types  # type: ignore[attr-defined]
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.extending import register_model
from numba.np.arrayobj import make_array

from loramux.kernels.cpu.instructions.compiled import cpu_features, exact, helper, intrinsic

LANES = 8
"""Number of lanes in the narrowest vector. All vectorised lengths (head_dim, page tokens and chunks) are multiples of
8.
"""

PANEL = 16
"""Number of outputs computed together: two AVX2 registers or one AVX-512 register."""

WIDTH = 16 if "avx512f" in cpu_features() else LANES
"""Number of float32 lanes in one register of this CPU."""

FIRST_CACHE, SECOND_CACHE = 3, 2
"""LLVM's prefetch locality values for the L1 and L2 caches."""

EXPONENTIAL = tuple(
    np.float32(value)
    for value in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
"""Coefficients of the polynomial in Cephes' expf, highest power first."""

_FLOAT = ir.FloatType()
_INT = ir.IntType(32)
_VECTOR = ir.VectorType(_FLOAT, PANEL)
_CONTRACT = ("contract",)


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"float32x{PANEL}")


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, frontend_type: Any) -> None:
        super().__init__(manager, frontend_type, _VECTOR)


_lanes = _Lanes()


def emit_splat(builder: Any, scalar: Any, count: int = LANES) -> Any:
    """A float32 broadcast to `count` lanes."""
    first = builder.insert_element(ir.Constant(ir.VectorType(_FLOAT, count), ir.Undefined), scalar, _INT(0))
    return builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_INT, count), [0] * count))


def emit_load(builder: Any, pointer: Any, dtype: Any, count: int = LANES) -> Any:
    """Load `count` elements (float32, bfloat16 bits as uint16, FP8 codes as uint8, or int8) as float32 lanes."""
    if dtype == types.float32:
        return builder.load(builder.bitcast(pointer, ir.VectorType(_FLOAT, count).as_pointer()), align=4)
    size = dtype.bitwidth // 8
    bits = builder.load(builder.bitcast(pointer, ir.VectorType(ir.IntType(8 * size), count).as_pointer()), align=size)
    if dtype == types.int8:
        return builder.sitofp(builder.sext(bits, ir.VectorType(_INT, count)), ir.VectorType(_FLOAT, count))
    return _emit_widened(builder, builder.zext(bits, ir.VectorType(_INT, count)), ir.VectorType(_FLOAT, count), size)


def _emit_widened(builder: Any, bits: Any, floats: Any, size: int) -> Any:
    """The float32 values, of type `floats`, of elements of `size` bytes, whose bits are int32: bfloat16 or FP8."""

    def shifted(mask: int, count: int) -> Any:
        kept, places = (_repeated(bits.type, number) for number in (mask, count))
        return builder.shl(builder.and_(bits, kept), places)

    if size == 2:
        return builder.bitcast(shifted(0xFFFF, 16), floats)
    # A float32 with these bits is 2**-120 times the value of the code, which is exact even if it is subnormal.
    small = builder.bitcast(builder.or_(shifted(0x80, 24), shifted(0x7F, 20)), floats)
    # With its own flags, numba adds none. A product with 2**120 and an activation first could be infinite.
    return builder.fmul(small, _repeated(floats, 2.0**120), flags=_CONTRACT)


def _repeated(kind: Any, number: float) -> Any:
    """A constant scalar, or a vector of equal constants."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def emit_multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Lanewise `a * b + c`, in one instruction if the CPU has fused multiply-add.

    The code sets its own flags, so numba adds none. A chain of these operations therefore keeps its order in every
    function.
    """
    return builder.fadd(builder.fmul(a, b, flags=_CONTRACT), c, flags=_CONTRACT)


def emit_halving(builder: Any, lanes: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Reduce all lanes to one value by repeatedly combining the two halves."""
    width = lanes.type.count
    while width > 1:
        width //= 2
        low = ir.Constant(ir.VectorType(_INT, width), list(range(width)))
        high = ir.Constant(ir.VectorType(_INT, width), list(range(width, 2 * width)))
        lanes = combine(builder.shuffle_vector(lanes, lanes, low), builder.shuffle_vector(lanes, lanes, high))
    return builder.extract_element(lanes, _INT(0))


def emit_exponential(builder: Any, x: Any) -> Any:
    """`exponential` of each lane, for use in an `exact` function."""
    count = x.type.count

    def constant(value: Any) -> Any:
        return ir.Constant(x.type, [float(np.float32(value))] * count)

    def multiply_add(a: Any, b: Any, c: Any) -> Any:
        return emit_multiply_add(builder, a, b, c)

    x = builder.select(builder.fcmp_ordered("<", x, constant(-87.0)), constant(-87.0), x)
    x = builder.select(builder.fcmp_ordered(">", x, constant(88.0)), constant(88.0), x)
    shifted = multiply_add(x, constant(1.4426950408889634), constant(12582912.0))
    n = builder.fsub(shifted, constant(12582912.0))
    fraction = multiply_add(n, constant(-0.693359375), x)
    fraction = multiply_add(n, constant(2.12194440e-4), fraction)
    y = constant(EXPONENTIAL[0])
    for coefficient in EXPONENTIAL[1:]:
        y = multiply_add(y, fraction, constant(coefficient))
    y = multiply_add(y, builder.fmul(fraction, fraction), builder.fadd(fraction, constant(1.0)))
    words = ir.VectorType(_INT, count)
    power = builder.shl(builder.bitcast(shifted, words), ir.Constant(words, [23] * count))
    return builder.bitcast(builder.add(builder.bitcast(y, words), power), x.type)


def emit_prefetch(builder: Any, pointer: Any, cache: int) -> None:
    """Prefetch the cache line at `pointer` into `cache`. An invalid address is ignored."""
    byte = ir.IntType(8).as_pointer()
    name = "llvm.prefetch.p0"
    known = builder.module.globals.get(name)
    prefetch = known or ir.Function(builder.module, ir.FunctionType(ir.VoidType(), (byte, _INT, _INT, _INT)), name)
    is_write, is_data = _INT(0), _INT(1)
    builder.call(prefetch, [builder.bitcast(pointer, byte), is_write, _INT(cache), is_data])


def _element_pointer(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(make_array(array_type)(context, builder, array).data, [index])


@intrinsic
def splat(typing_context: Any, value: Any) -> Any:
    """A float32 broadcast to all lanes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_splat(builder, args[0], PANEL)

    return _lanes(types.float32), generate


@intrinsic
def load(typing_context: Any, array: Any, index: Any) -> Any:
    """Lanes `array[index:index + 16]` of a contiguous float32 array, without bounds checks."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_load(builder, _element_pointer(context, builder, array, args[0], args[1]), array.dtype, PANEL)

    return _lanes(array, types.intp), generate


@intrinsic
def store(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """`array[index:index + 16] = value` in a contiguous float32 array, without bounds checks."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element_pointer(context, builder, array, args[0], args[1])
        builder.store(args[2], builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.none(array, types.intp, _lanes), generate


def _lanewise(emit: Callable[[Any, Any, Any], Any]) -> Any:
    """Build a lanewise function of two values, either of which may be a scalar."""

    @intrinsic
    def combine(typing_context: Any, a: Any, b: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pairs = zip(args, (a, b), strict=True)
            lanes = [value if kind == _lanes else emit_splat(builder, value, PANEL) for value, kind in pairs]
            return emit(builder, *lanes)

        return _lanes(*(kind if kind == _lanes else types.float32 for kind in (a, b))), generate

    return combine


plus = _lanewise(lambda builder, a, b: builder.fadd(a, b))
minus = _lanewise(lambda builder, a, b: builder.fsub(a, b))
times = _lanewise(lambda builder, a, b: builder.fmul(a, b))
over = _lanewise(lambda builder, a, b: builder.fdiv(a, b))
larger = _lanewise(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@intrinsic
def _exponentials(typing_context: Any, x: Any) -> Any:

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_exponential(builder, args[0])

    return _lanes(_lanes), generate


@exact
def exponentials(x: Any) -> Any:
    """`exponential` of each lane."""
    return _exponentials(x)


@intrinsic
def total(typing_context: Any, x: Any) -> Any:
    """The sum of all lanes, computed by combining halves."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit_halving(builder, args[0], builder.fadd)

    return types.float32(_lanes), generate


@intrinsic
def largest(typing_context: Any, x: Any) -> Any:
    """The largest lane."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def larger_of(a: Any, b: Any) -> Any:
            return builder.select(builder.fcmp_ordered(">", a, b), a, b)

        return emit_halving(builder, args[0], larger_of)

    return types.float32(_lanes), generate


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of `array[index]` into the L1 cache. The element need not exist."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_prefetch(builder, _element_pointer(context, builder, array, args[0], args[1]), FIRST_CACHE)
        return context.get_dummy_value()

    return types.none(array, types.intp), generate


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
    """An array element (float32, bfloat16 bits as uint16, or an FP8 code as uint8) as float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if value == types.float32:
            return args[0]
        return _emit_widened(builder, builder.zext(args[0], _INT), _FLOAT, value.bitwidth // 8)

    return types.float32(value), generate


@intrinsic
def narrow(typing_context: Any, array: Any, value: Any) -> Any:
    """Convert a float32 to an element of `array`, rounding to the nearest bfloat16, ties to even. NaN stays NaN."""

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
def pointer_at(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


def stack_memory(num_bytes: int) -> Any:
    """A function without arguments, for kernels. It returns the address of memory on the stack of its caller.

    The memory begins with a cache line and is not initialised.
    """

    @intrinsic
    def address(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            # `cgutils.alloca_once` would fill the memory with zeros.
            with builder.goto_entry_block():
                memory = builder.alloca(ir.ArrayType(ir.IntType(8), num_bytes))
            memory.align = 64
            return builder.ptrtoint(memory, ir.IntType(64))

        return types.int64(), generate

    return address


@helper
def floats_at(address: int) -> Any:
    """The float32 values that start at a memory address, as a contiguous array of unlimited length.

    Kernels accept activations as an address and a row stride, so views into wider rows need no copy, and one compiled
    version works for all strides.
    """
    return carray(pointer_at(address), (1 << 48,), np.float32)


@helper
def integers_at(address: int) -> Any:
    """The int32 values that start at a memory address, as a contiguous array of unlimited length."""
    return carray(pointer_at(address), (1 << 48,), np.int32)


@helper
def halves_at(address: int) -> Any:
    """The bfloat16 bits that start at a memory address, as a contiguous uint16 array of unlimited length."""
    return carray(pointer_at(address), (1 << 48,), np.uint16)


@exact
def exponential(x: np.float32) -> np.float32:
    """`exp(x)` to about one unit in the last place, with `x` clamped to `[-87, 88]`. NaN stays NaN.

    Uses plain arithmetic (after Cephes' expf), because loops over library calls cannot be vectorised.
    """
    if x < np.float32(-87.0):
        x = np.float32(-87.0)
    if x > np.float32(88.0):
        x = np.float32(88.0)
    # Adding 1.5 * 2**23 rounds to an integer n and leaves it in the low bits.
    shifted = x * np.float32(1.4426950408889634) + np.float32(12582912.0)
    n = shifted - np.float32(12582912.0)
    fraction = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    y = EXPONENTIAL[0]
    for coefficient in EXPONENTIAL[1:]:
        y = y * fraction + coefficient
    y = y * fraction * fraction + fraction + np.float32(1.0)
    # Adding the low 9 bits of the shifted sum to the exponent multiplies by 2**n.
    return float_of_bits(np.int32(float_bits(y) + (float_bits(shifted) << np.int32(23))))
