"""LLVM code for the innermost loops of the CPU's matrix products: blocks of rows times part of a weight, K or V.

The sums of a block stay in registers throughout the loop, so each weight is loaded and widened once for all rows of the
block (Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008). The order of summation is the
same for any number of rows, so a row's result is bitwise independent of the other rows.

Memory is prefetched explicitly: weights one block or two steps ahead if only a few rows share them, K and V one page
ahead, and adapters across rank, module and adapter boundaries. On two cores of a shared machine, prefetching made
decode with 600 tokens of context 1.9 times as fast. Adapters are still read more slowly than weights, because a page
stores only a short contiguous run for each layer: 32 KiB with 8 KV heads of dimension 64. Two cores with AMX, which
read memory sequentially at 32 GB/s, read such runs at 12 GB/s without prefetching and at 23 GB/s with it.

Rows are float32, passed as a tuple of addresses or as a first address and a step. Weights are a flat array of float32,
or of bfloat16 bits as uint16. K and V can also be int8 codes, and adapters FP8 codes as uint8. Bounds are not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.np.arrayobj import make_array

from loramux.kernels.cpu.instructions.compiled import helper, intrinsic
from loramux.kernels.cpu.instructions.vectors import (
    LANES,
    PANEL,
    SECOND_CACHE,
    WIDTH,
    emit_halving,
    emit_load,
    emit_multiply_add,
    emit_prefetch,
    emit_splat,
    floats_at,
)

MAX_ROWS = 6 if WIDTH == LANES else 12
"""Maximum number of rows per block. Their sums fit in the registers together with the operands."""

DOTS_STEP = 32
"""Elements per step of `dots`: one cache line of bfloat16."""

COLUMNS_STEP = 32
"""Outputs per step of `add_ranks_to_sums`: one cache line of bfloat16."""

_FLOAT = ir.FloatType()
_INT = ir.IntType(32)
_LONG = ir.IntType(64)
_ZERO = _LONG(0)

Emit = Callable[[Any], Any]


def emit_rows(
    builder: Any,
    most: int,
    num_rows: Any,
    x: Any,
    x_step: Any,
    y: Any,
    y_step: Any,
    emit: Callable[[Any, Any], None],
    least: int = 1,
) -> None:
    """Emit code for each number of rows in `[least, most]` with `emit(x_rows, y_rows)`, and a switch on `num_rows`.

    Rows are passed as addresses. Rows of `x` are `x_step` bytes apart, and rows of `y` are `y_step` bytes apart.
    """
    done = builder.append_basic_block("done")
    switch = builder.switch(num_rows, done)
    for count in range(least, most + 1):
        block = builder.append_basic_block(f"rows{count}")
        switch.add_case(_LONG(count), block)
        builder.position_at_end(block)
        steps = [_LONG(row) for row in range(count)]
        emit(
            [builder.add(x, builder.mul(x_step, step)) for step in steps],
            [builder.add(y, builder.mul(y_step, step)) for step in steps],
        )
        builder.branch(done)
    builder.position_at_end(done)


@helper
def begin_outputs(y: int, y_step: int, num_rows: int, width: int, bias: int) -> None:
    """`y[r][o] = bias[o]` for `width` outputs `o`, or 0 if the address `bias` is 0. Rows are `y_step` bytes apart."""
    for r in range(num_rows):
        row = floats_at(y + r * y_step)
        if bias == 0:
            for o in range(width):
                row[o] = np.float32(0)
        else:
            added = floats_at(bias)
            for o in range(width):
                row[o] = added[o]


def _panel_adder(width: int) -> Any:
    """Build a function like `add_panels` for panels of `width` outputs."""

    @intrinsic
    def add_block(
        typing_context: Any, num_rows: Any, x: Any, x_step: Any, weights: Any, first: Any, step: Any, size: Any, y: Any,
        y_step: Any,
    ) -> Any:  # fmt: skip
        """`y[r][o] += sum over k of x[r][k] * weights[first + step * k + o]`, for 1 to MAX_ROWS rows, `size` >= 1."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            num_rows, x, x_step, array, first, step, size, y, y_step = args
            panel = builder.gep(make_array(weights)(context, builder, array).data, [first])
            lanes = ir.VectorType(_FLOAT, width)

            def lanes_at(k: Any) -> Any:
                return emit_load(builder, builder.gep(panel, [builder.mul(k, step)]), weights.dtype, width)

            def emit(x_rows: Any, y_rows: Any) -> None:
                places = [builder.inttoptr(row, lanes.as_pointer()) for row in y_rows]
                before = [builder.load(place, align=4) for place in places]
                totals = _sums_of_products(builder, x_rows, lanes_at, size, before)
                for place, total in zip(places, totals, strict=True):
                    builder.store(total, place, align=4)

            emit_rows(builder, MAX_ROWS, num_rows, x, x_step, y, y_step, emit)
            return context.get_dummy_value()

        long = types.int64
        return types.none(long, long, long, weights, long, long, long, long, long), generate

    @helper
    def add(
        x: int, x_step: int, num_rows: int, weights: Any, first: int, step: int, size: int, y: int, y_step: int
    ) -> None:
        num_blocks = (num_rows + MAX_ROWS - 1) // MAX_ROWS
        for block in range(num_blocks):
            # Make blocks nearly equal in size, because a small block would load each weight for only a few rows.
            begin, end = num_rows * block // num_blocks, num_rows * (block + 1) // num_blocks
            add_block(end - begin, x + begin * x_step, x_step, weights, first, step, size, y + begin * y_step, y_step)

    return add


add_panels = _panel_adder(PANEL)
"""`y[r][o] += sum over k of x[r][k] * weights[first + step * k + o]`, for 16 outputs `o` and `size` >= 1 inputs `k`.

`x` and `y` are the addresses of their first rows. Rows are `x_step` and `y_step` bytes apart.
"""

add_half_panels = _panel_adder(PANEL // 2)
"""`add_panels` for 8 outputs."""


def _addresses_of(count: int) -> Any:
    """Build a function that returns the addresses of `count` rows of a segment, for `add_ranks` and `dots`."""

    @intrinsic
    def addresses(typing_context: Any, address: Any, step: Any, rows: Any, begin: Any) -> Any:
        """`address + step * rows[begin + i]` for each `i`, as a tuple. `rows` is an array of int32."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            address, step, array, begin = args
            first = builder.gep(make_array(rows)(context, builder, array).data, [begin])
            numbers = [builder.sext(builder.load(builder.gep(first, [_LONG(i)])), _LONG) for i in range(count)]
            found = [builder.add(address, builder.mul(step, number)) for number in numbers]
            return context.make_tuple(builder, signature.return_type, found)

        long = types.int64
        return types.UniTuple(long, count)(long, long, rows, long), generate

    return addresses


two_rows, three_rows, four_rows, five_rows, six_rows, eight_rows = (
    _addresses_of(count) for count in (2, 3, 4, 5, 6, 8)
)


@intrinsic
def add_ranks(
    typing_context: Any, x: Any, weights: Any, places: Any, offset: Any, size: Any, factor: Any, y: Any
) -> Any:
    """`y[r][o] += factor * sum over k of x[r][k] * weights[places[k] + o]`, for the 16 outputs `o` from `offset` on.

    `size` >= 1 is the number of values of `k`. `x` and `y` are tuples of addresses, and `places` is an array of int64.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, array, places_array, offset, size, factor, y = args
        start = builder.gep(make_array(weights)(context, builder, array).data, [offset])
        place = make_array(places)(context, builder, places_array).data

        def lanes_at(k: Any) -> Any:
            return emit_load(builder, builder.gep(start, [builder.load(builder.gep(place, [k]))]), weights.dtype, PANEL)

        lanes = ir.VectorType(_FLOAT, PANEL)
        y_rows = [
            builder.bitcast(builder.gep(row, [offset]), lanes.as_pointer()) for row in _pointers(builder, y, _FLOAT)
        ]
        zeros = [ir.Constant(lanes, [0.0] * PANEL) for _ in y_rows]
        factors = emit_splat(builder, factor, PANEL)
        totals = _sums_of_products(builder, cgutils.unpack_tuple(builder, x), lanes_at, size, zeros)
        for row, total in zip(y_rows, totals, strict=True):
            builder.store(emit_multiply_add(builder, factors, total, builder.load(row, align=4)), row, align=4)
        return context.get_dummy_value()

    return types.none(x, weights, places, types.int64, types.int64, types.float32, y), generate


@intrinsic
def dots(typing_context: Any, x: Any, weights: Any, a: Any, ahead: Any, size: Any) -> Any:
    """`x[r] · weights[a[c] : a[c] + size]` for all rows `r` and a tuple of places `a`, as one row-major tuple.

    `size` is a multiple of 8 and may be 0. The call also prefetches the weights at `ahead`, which are the places of the
    next call.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, array, a, ahead, size = args
        flat = make_array(weights)(context, builder, array).data
        x_rows = _pointers(builder, x, _FLOAT)
        columns = [builder.gep(flat, [index]) for index in cgutils.unpack_tuple(builder, a)]
        following = [builder.gep(flat, [index]) for index in cgutils.unpack_tuple(builder, ahead)]

        def sums_of(width: int, begin: Any, end: Any, step_size: int) -> list[Any]:
            """Dot products over the elements `[begin, end)`, `step_size` at a time, in vectors of `width` lanes."""
            lanes = ir.VectorType(_FLOAT, width)
            zeros = [ir.Constant(lanes, [0.0] * width)] * (len(x_rows) * len(columns))

            def step(k: Any, sums: list[Any]) -> list[Any]:
                # A whole step is one cache line of bfloat16. Shorter steps would prefetch the same line several times.
                if step_size > LANES:
                    for column in following:
                        emit_prefetch(builder, builder.gep(column, [k]), SECOND_CACHE)
                for part in range(0, step_size, width):
                    e = builder.add(k, _LONG(part))
                    rows = [
                        builder.load(builder.bitcast(builder.gep(row, [e]), lanes.as_pointer()), align=4)
                        for row in x_rows
                    ]
                    values = [emit_load(builder, builder.gep(column, [e]), weights.dtype, width) for column in columns]
                    pairs = [(row, value) for row in rows for value in values]
                    sums = [emit_multiply_add(builder, *pair, total) for pair, total in zip(pairs, sums, strict=True)]
                return sums

            return [
                emit_halving(builder, total, builder.fadd)
                for total in emit_loop(builder, end, step_size, zeros, step, begin)
            ]

        whole = builder.and_(size, _LONG(-DOTS_STEP))
        wide = sums_of(WIDTH, _LONG(0), whole, DOTS_STEP)
        rest = sums_of(LANES, whole, size, LANES)
        result = signature.return_type
        totals = [builder.fadd(first, last) for first, last in zip(wide, rest, strict=True)]
        return context.make_tuple(builder, result, totals)

    return types.UniTuple(types.float32, len(x) * len(a))(x, weights, a, ahead, types.int64), generate


@intrinsic
def add_ranks_to_sums(typing_context: Any, x: Any, weights: Any, places: Any, ahead: Any, size: Any, sums: Any) -> Any:
    """`sums[o] += sum over k of x[k] * weights[places[k] + o]` for `size` outputs `o`, in order of increasing `k`.

    `x` and `sums` are addresses. `places` and `ahead` are tuples. `size` is a multiple of 16. The call also prefetches
    the weights at `ahead`.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, array, places, ahead, size, sums = args
        flat = make_array(weights)(context, builder, array).data
        lanes = ir.VectorType(_FLOAT, PANEL)
        row, outputs = (builder.inttoptr(address, _FLOAT.as_pointer()) for address in (x, sums))
        columns = [builder.gep(flat, [index]) for index in cgutils.unpack_tuple(builder, places)]
        following = [builder.gep(flat, [index]) for index in cgutils.unpack_tuple(builder, ahead)]
        factors = [emit_splat(builder, builder.load(builder.gep(row, [_LONG(k)])), PANEL) for k in range(len(columns))]

        def add(o: Any) -> None:
            # Add all ranks to the outputs while they are in a register, so each output is loaded and stored once.
            place = builder.bitcast(builder.gep(outputs, [o]), lanes.as_pointer())
            value = builder.load(place, align=4)
            for factor, column in zip(factors, columns, strict=True):
                part = emit_load(builder, builder.gep(column, [o]), weights.dtype, PANEL)
                value = emit_multiply_add(builder, factor, part, value)
            builder.store(value, place, align=4)

        def whole_step(o: Any, values: list[Any]) -> list[Any]:
            for column in following:
                emit_prefetch(builder, builder.gep(column, [o]), SECOND_CACHE)
            for part in range(0, COLUMNS_STEP, PANEL):
                add(builder.add(o, _LONG(part)))
            return values

        def last_step(o: Any, values: list[Any]) -> list[Any]:
            add(o)
            return values

        # `size` is a multiple of PANEL but not of COLUMNS_STEP, so up to one panel is left.
        whole = builder.and_(size, _LONG(-COLUMNS_STEP))
        emit_loop(builder, whole, COLUMNS_STEP, [], whole_step)
        emit_loop(builder, size, PANEL, [], last_step, whole)
        return context.get_dummy_value()

    return types.none(types.int64, weights, places, ahead, types.int64, types.int64), generate


@intrinsic
def scale_and_shift(typing_context: Any, weights: Any, gain: Any, shift: Any, size: Any, y: Any) -> Any:
    """`y[o] += weights[gain + o] * y[o] + weights[shift + o]` for `size` outputs `o`, a multiple of 16.

    `y` is an address.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, gain, shift, size, y = args
        flat = make_array(weights)(context, builder, array).data
        gains, shifts = (builder.gep(flat, [index]) for index in (gain, shift))
        lanes = ir.VectorType(_FLOAT, PANEL)
        outputs = builder.inttoptr(y, _FLOAT.as_pointer())

        def step(o: Any, values: list[Any]) -> list[Any]:
            place = builder.bitcast(builder.gep(outputs, [o]), lanes.as_pointer())
            value = builder.load(place, align=4)
            gain_lanes, shift_lanes = (
                emit_load(builder, builder.gep(row, [o]), weights.dtype, PANEL) for row in (gains, shifts)
            )
            shifted = builder.fadd(value, shift_lanes)
            builder.store(emit_multiply_add(builder, gain_lanes, value, shifted), place, align=4)
            return values

        emit_loop(builder, size, PANEL, [], step)
        return context.get_dummy_value()

    return types.none(weights, types.int64, types.int64, types.int64, types.int64), generate


def _sums_of_products(builder: Any, x: list[Any], lanes_at: Emit, size: Any, before: list[Any]) -> list[Any]:
    """`before[r] + sum over k of x[r][k] * lanes_at(k)` for `size` >= 1 elements `k`. `x` contains addresses."""
    x_rows = [builder.inttoptr(row, _FLOAT.as_pointer()) for row in x]

    def step(k: Any, sums: list[Any]) -> list[Any]:
        lanes = lanes_at(k)
        return [
            emit_multiply_add(
                builder, emit_splat(builder, builder.load(builder.gep(row, [k])), lanes.type.count), lanes, total
            )
            for row, total in zip(x_rows, sums, strict=True)
        ]

    return emit_loop(builder, size, 1, before, step)


def emit_loop(
    builder: Any,
    size: Any,
    step_size: int,
    before: list[Any],
    step: Callable[[Any, list[Any]], list[Any]],
    begin: Any = _ZERO,
) -> list[Any]:
    """Emit a loop of `values = step(k, values)` over `range(begin, size, step_size)`. Values stay in registers."""
    entry = builder.block
    check, body, done = (builder.append_basic_block(name) for name in ("check", "body", "done"))
    builder.branch(check)
    builder.position_at_end(check)
    k = builder.phi(_LONG)
    values = [builder.phi(value.type) for value in before]
    builder.cbranch(builder.icmp_signed("<", k, size), body, done)
    builder.position_at_end(body)
    after = step(k, values)
    k.add_incoming(begin, entry)
    k.add_incoming(builder.add(k, _LONG(step_size)), builder.block)
    for value, first, following in zip(values, before, after, strict=True):
        value.add_incoming(first, entry)
        value.add_incoming(following, builder.block)
    builder.branch(check)
    builder.position_at_end(done)
    return values


def _pointers(builder: Any, addresses: Any, element: Any) -> list[Any]:
    return [builder.inttoptr(address, element.as_pointer()) for address in cgutils.unpack_tuple(builder, addresses)]
