"""The innermost loops of the CPU's matrix multiplications, as LLVM code: blocks of rows times a piece of a weight.

The sums of a block stay in registers while the loop runs, so that each weight that is loaded and widened serves every
row of the block (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008). Each sum has one
order whatever the number of rows, so that the bits of a row do not depend on its neighbours.

Rows are tuples of float32 addresses, one for each row; weights lie in a flat array of float32, or of the uint16 bits of
bfloat16. Bounds are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.np.arrayobj import make_array

from loramux.kernels.compiled import intrinsic
from loramux.kernels.cpu_vectors import LANES, emit_load, emit_multiply_add, emit_splat

PANEL = 16
"""Outputs of `add_panel` and `add_ranks`: two AVX2 registers or one of AVX-512 for each row."""

_FLOAT = ir.FloatType()
_INT = ir.IntType(32)
_LONG = ir.IntType(64)

Emit = Callable[[Any], Any]


@intrinsic
def add_panel(typing_context: Any, x: Any, weights: Any, first: Any, size: Any, y: Any) -> Any:
    """`y[r][o] += sum over k of x[r][k] * weights[first + 16 k + o]`, of `size` >= 1 elements `k`.

    With AVX2 six rows are the most whose sums fit into the registers.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, array, first, size, y = args
        panel = builder.gep(make_array(weights)(context, builder, array).data, [first])

        def lanes_at(k: Any) -> Any:
            return emit_load(builder, builder.gep(panel, [builder.mul(k, _LONG(PANEL))]), weights.dtype, PANEL)

        y_rows = _pointers(builder, y, ir.VectorType(_FLOAT, PANEL))
        before = [builder.load(row, align=4) for row in y_rows]
        for row, total in zip(y_rows, _sums_of_products(builder, x, lanes_at, size, before), strict=True):
            builder.store(total, row, align=4)
        return context.get_dummy_value()

    return types.none(x, weights, types.int64, types.int64, y), generate


@intrinsic
def add_ranks(
    typing_context: Any, x: Any, weights: Any, places: Any, offset: Any, size: Any, factor: Any, y: Any
) -> Any:
    """`y[r][o] += factor * sum over k of x[r][k] * weights[places[k] + offset + o]`, of 16 `o` and `size` >= 1 `k`.

    `places` is an array of int64.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, array, places_array, offset, size, factor, y = args
        start = builder.gep(make_array(weights)(context, builder, array).data, [offset])
        place = make_array(places)(context, builder, places_array).data

        def lanes_at(k: Any) -> Any:
            return emit_load(builder, builder.gep(start, [builder.load(builder.gep(place, [k]))]), weights.dtype, PANEL)

        y_rows = _pointers(builder, y, ir.VectorType(_FLOAT, PANEL))
        zeros = [ir.Constant(ir.VectorType(_FLOAT, PANEL), [0.0] * PANEL) for _ in y_rows]
        factors = emit_splat(builder, factor, PANEL)
        for row, total in zip(y_rows, _sums_of_products(builder, x, lanes_at, size, zeros), strict=True):
            builder.store(emit_multiply_add(builder, factors, total, builder.load(row, align=4)), row, align=4)
        return context.get_dummy_value()

    return types.none(x, weights, places, types.int64, types.int64, types.float32, y), generate


@intrinsic
def dots(typing_context: Any, x: Any, weights: Any, a: Any, size: Any) -> Any:
    """`x[r] · weights[a[c] : a[c] + size]` for all rows `r` and a tuple of places `a`, as one tuple, rows first.

    `size` is a multiple of 8, and may be 0.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, array, a, size = args
        flat = make_array(weights)(context, builder, array).data
        x_rows = _pointers(builder, x, _FLOAT)
        columns = [builder.gep(flat, [index]) for index in cgutils.unpack_tuple(builder, a)]
        lanes = ir.VectorType(_FLOAT, LANES)
        zeros = [ir.Constant(lanes, [0.0] * LANES)] * (len(x_rows) * len(columns))

        def step(k: Any, sums: list[Any]) -> list[Any]:
            rows = [builder.load(builder.bitcast(builder.gep(row, [k]), lanes.as_pointer()), align=4) for row in x_rows]
            values = [emit_load(builder, builder.gep(column, [k]), weights.dtype, LANES) for column in columns]
            factors = [(row, value) for row in rows for value in values]
            return [emit_multiply_add(builder, *pair, total) for pair, total in zip(factors, sums, strict=True)]

        totals = _loop(builder, size, LANES, zeros, step)
        result = signature.return_type
        return context.make_tuple(builder, result, [_total(builder, lanes) for lanes in totals])

    return types.UniTuple(types.float32, len(x) * len(a))(x, weights, a, types.int64), generate


def _sums_of_products(builder: Any, x: Any, lanes_at: Emit, size: Any, before: list[Any]) -> list[Any]:
    """`before[r] + sum over k of x[r][k] * lanes_at(k)` for `size` >= 1 elements `k`."""
    x_rows = _pointers(builder, x, _FLOAT)

    def step(k: Any, sums: list[Any]) -> list[Any]:
        lanes = lanes_at(k)
        return [
            emit_multiply_add(builder, emit_splat(builder, builder.load(builder.gep(row, [k])), PANEL), lanes, total)
            for row, total in zip(x_rows, sums, strict=True)
        ]

    return _loop(builder, size, 1, before, step)


def _loop(
    builder: Any, size: Any, step_size: int, before: list[Any], step: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """The values after `step(k, values)` for `k` in `range(0, size, step_size)`; they stay in registers."""
    entry = builder.block
    check, body, done = (builder.append_basic_block(name) for name in ("check", "body", "done"))
    builder.branch(check)
    builder.position_at_end(check)
    k = builder.phi(_LONG)
    values = [builder.phi(value.type) for value in before]
    builder.cbranch(builder.icmp_signed("<", k, size), body, done)
    builder.position_at_end(body)
    after = step(k, values)
    k.add_incoming(_LONG(0), entry)
    k.add_incoming(builder.add(k, _LONG(step_size)), builder.block)
    for value, first, following in zip(values, before, after, strict=True):
        value.add_incoming(first, entry)
        value.add_incoming(following, builder.block)
    builder.branch(check)
    builder.position_at_end(done)
    return values


def _pointers(builder: Any, addresses: Any, element: Any) -> list[Any]:
    return [builder.inttoptr(address, element.as_pointer()) for address in cgutils.unpack_tuple(builder, addresses)]


def _total(builder: Any, lanes: Any) -> Any:
    width = LANES
    while width > 1:
        width //= 2
        low = ir.Constant(ir.VectorType(_INT, width), list(range(width)))
        high = ir.Constant(ir.VectorType(_INT, width), list(range(width, 2 * width)))
        lanes = builder.fadd(builder.shuffle_vector(lanes, lanes, low), builder.shuffle_vector(lanes, lanes, high))
    return builder.extract_element(lanes, _INT(0))
