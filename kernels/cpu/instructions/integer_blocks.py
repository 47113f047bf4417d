"""LLVM code for the innermost loop of products with quantised weights: a block of rows times a block of one panel.

Up to 128 inputs are multiplied in integers: `x`, rounded to 16 or 8 bits, times the integers that the weight's codes
represent. Sums of integers are exact, so the result is bitwise the same on every x86 CPU and for any number of rows.
Only the sum of a block is scaled and added to `y`, in float32, with the group's minimum times the sum of the row's `x`.

Two adjacent inputs of a row are one 32-bit word, which is broadcast to all outputs. One instruction multiplies both
inputs and adds the products: `vpdpwssd` with AVX512_VNNI or AVX_VNNI, otherwise `vpmaddwd` followed by an addition
(Intel, "Intrinsics Guide"). 8-bit codes are the integers themselves. 4-bit codes are indices into a table of 16
integers, which stays in a register. With AVX2, codes that represent consecutive integers (int4) are not looked up. The
codes themselves are multiplied, and each sum starts at the first integer times the sum of the row's `x`.

With `x` in 8 bits, a word holds four adjacent inputs. `vpdpbusd`, which AVX512_VNNI and AVX_VNNI both have, multiplies
them by unsigned bytes. The weight's bytes are therefore its integers plus 128, and each sum starts at -128 times the
sum of the row's `x` in the block. Codes that are not looked up are already unsigned. Without VNNI, AVX2 multiplies only
these codes by bytes: `vpmaddubsw` adds products in 16 bits, and sums of larger integers would not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.np.arrayobj import make_array

from loramux.kernels.cpu.instructions.blocks import Emit, emit_rows
from loramux.kernels.cpu.instructions.capability import integer_products
from loramux.kernels.cpu.instructions.compiled import cpu_features, intrinsic
from loramux.kernels.cpu.instructions.vectors import FIRST_CACHE, WIDTH, emit_multiply_add, emit_prefetch, emit_splat

OUTPUTS = 32
"""Outputs in a panel."""

MAX_ROWS = 12 if WIDTH == 16 else 6
"""Maximum number of rows per block."""

AHEAD_BYTES = 8192
"""Distance at which codes are prefetched, in bytes."""

REGISTERS = OUTPUTS // WIDTH
"""Registers that hold the sums of one row for a whole panel."""

INTERLEAVED = [*range(4), *range(8, 12), *range(4, 8), *range(12, 16)]
"""The order of 16 outputs that AVX2's `vpunpcklbw` and similar instructions turn into ascending order."""

WHOLE_PANEL = slice(0, REGISTERS)
"""The registers of all outputs of a panel."""

HAS_BYTE_TABLES = WIDTH != 16
"""True without AVX-512: AVX2 can look up only bytes in a register, while AVX-512 can look up 16-bit integers."""

IS_SUPPORTED = integer_products(cpu_features()) is not None
"""True if this CPU has the instructions that this file uses."""

HAS_VNNI = ("avx512vnni" if WIDTH == 16 else "avxvnni") in cpu_features()

BYTE_WORDS = 4
"""Words whose products are summed in 16 bits by `_emit_byte_dots`. A word adds at most `2 * 15 * 127` in magnitude."""

UNSIGNED = 128
"""Offset that turns the weight's integers into unsigned bytes, which `vpdpbusd` requires."""

_BYTE, _HALF, _INT, _LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_WORDS = ir.VectorType(_INT, WIDTH)
_PAIRS = ir.VectorType(_HALF, 2 * WIDTH)
_FLOATS = ir.VectorType(_FLOAT, WIDTH)
_QUADS = ir.VectorType(_BYTE, 4 * WIDTH)
_PACKED = ir.VectorType(_BYTE, OUTPUTS)
_CONTRACT = ("contract",)


@intrinsic
def add_codes(
    typing_context: Any, num_rows: Any, x: Any, x_step: Any, x_type: Any, factors: Any, factor_step: Any, panels: Any,
    head: Any, scale_bytes: Any, minimum_bytes: Any, codes: Any, table: Any, num_pairs: Any, y: Any, y_step: Any,
) -> Any:  # fmt: skip
    """`y[r][o] += factor[r] * sum over k of x[r][k] * (scale[o] * integer[k][o] + minimum[o])`, for 1 to MAX_ROWS rows.

    `x`, `factors` and `y` are addresses, with steps in bytes. A row of `factors` is a float32 factor and the int32 sum
    of the row's `x` over `k`. `head` and `codes` are byte offsets in `panels`; the scales are at `head`, see
    `emit_head`. `num_pairs` >= 1 is the number of pairs of inputs `k`. `table` is `CodePanels.table`. `x_type` is
    np.int16 or, if `takes_bytes` allows it, np.int8.
    """
    is_bytes = x_type.dtype == types.int8

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, x, x_step, _, factors, factor_step, array, *where, table_array, num_pairs, y, y_step = args
        data = make_array(panels)(context, builder, array).data
        head, scale_bytes, minimum_bytes, codes = where
        head_place, code_place = (builder.gep(data, [place]) for place in (head, codes))
        lookup = table_of(context, builder, table, table_array, is_bytes)
        offset = offset_of(lookup, is_bytes)

        def emit(x_rows: list[Any], y_rows: list[Any]) -> None:
            factor_rows = [builder.add(factors, builder.mul(factor_step, _LONG(r))) for r in range(len(x_rows))]
            num_words = builder.lshr(num_pairs, _LONG(1)) if is_bytes else num_pairs
            for part in parts_of_panel(len(x_rows), isinstance(lookup, _Table), is_bytes):

                def weights_at(k: Any, part: slice = part) -> list[Any]:
                    return (emit_quads if is_bytes else emit_weights)(builder, code_place, k, lookup)[part]

                starts = emit_starts(builder, factor_rows, offset, part)
                sums = emit_sums(builder, x_rows, weights_at, num_words, starts, is_bytes)
                scales, minima = emit_head(builder, head_place, scale_bytes, minimum_bytes, part)
                emit_outputs(builder, sums, factor_rows, scales, minima, y_rows, part)

        emit_rows(builder, MAX_ROWS, num_rows, x, x_step, y, y_step, emit)
        return context.get_dummy_value()

    long = types.int64
    where = (long, long, long, long)
    return types.none(long, long, long, x_type, long, long, panels, *where, table, long, long, long), generate


def parts_of_panel(num_rows: int, has_table: bool, is_bytes: bool) -> list[slice]:
    """Divide the registers of a panel into parts, which a block of rows computes one after another.

    The sums of a part must fit in the registers together with the operands and the table of codes. AVX2 has only 16
    registers, so most blocks compute half a panel or less at a time.
    """
    num_parts = 2
    if is_bytes and not HAS_VNNI:
        # The weights of BYTE_WORDS words must fit in the registers, too.
        num_parts = 2 if num_rows <= 2 else 4
    elif WIDTH == 16 or num_rows == 1 or (num_rows == 2 and not has_table):
        num_parts = 1
    size = REGISTERS // num_parts
    return [slice(begin, begin + size) for begin in range(0, REGISTERS, size)]


class _Table:
    """The 16 integers of 4-bit codes, repeated twice to fill a register."""

    def __init__(self, builder: Any, data: Any, dtype: Any) -> None:
        element = _BYTE if dtype == types.int8 else _HALF
        values = builder.load(builder.bitcast(data, ir.VectorType(element, 16).as_pointer()), align=1)
        twice = ir.Constant(ir.VectorType(_INT, 32), [*range(16), *range(16)])
        both = builder.shuffle_vector(values, values, twice)
        self._tables = [both]
        if HAS_BYTE_TABLES and element == _HALF:
            self._tables = [builder.trunc(part, _PACKED) for part in (both, _shifted(builder, both, 8))]

    def select(self, builder: Any, place: Any) -> list[Any]:
        """The weights of all outputs for one pair of inputs, as integers. Each output's two weights are adjacent."""
        codes = builder.load(builder.bitcast(place, _PACKED.as_pointer()), align=1)
        if HAS_BYTE_TABLES:
            return [part for index in _nibbles(builder, [codes]) for part in self._select_bytes(builder, index)]
        # Only the 5 low bits of an index count, and the table holds the integers twice, so the upper code need not be
        # masked out of the index of the lower code.
        lower = builder.zext(codes, _PAIRS)
        choose = _function(builder, "llvm.x86.avx512.permvar.hi.512", _PAIRS, [_PAIRS, _PAIRS])
        return [builder.call(choose, [self._tables[0], index]) for index in (lower, _shifted(builder, lower, 4))]

    def _select_bytes(self, builder: Any, index: Any) -> list[Any]:
        """The integers of 32 codes, in two registers. Each integer is looked up as one byte, or as two bytes."""
        choose = _function(builder, "llvm.x86.avx2.pshuf.b", _PACKED, [_PACKED, _PACKED])
        found = [builder.call(choose, [table, index]) for table in self._tables]
        integers = []
        for begin in (0, 16):
            lanes = ir.Constant(ir.VectorType(_INT, 16), list(range(begin, begin + 16)))
            halves = [builder.shuffle_vector(part, part, lanes) for part in found]
            if len(halves) == 1:
                integers.append(builder.sext(halves[0], _PAIRS))
            else:
                lower, upper = (builder.zext(half, _PAIRS) for half in halves)
                integers.append(builder.or_(lower, builder.shl(upper, ir.Constant(_PAIRS, [8] * 16))))
        return integers


class _ByteTable:
    """The 16 integers of 4-bit codes, plus 128, as bytes repeated to fill a register."""

    def __init__(self, builder: Any, data: Any, dtype: Any) -> None:
        element = _BYTE if dtype == types.int8 else _HALF
        values = builder.load(builder.bitcast(data, ir.VectorType(element, 16).as_pointer()), align=1)
        signed = values if element == _BYTE else builder.trunc(values, ir.VectorType(_BYTE, 16))
        repeated = ir.Constant(ir.VectorType(_INT, 4 * WIDTH), list(range(16)) * (WIDTH // 4))
        self._table = _plus_128(builder, builder.shuffle_vector(signed, signed, repeated))

    def select_bytes(self, builder: Any, codes: list[Any]) -> list[Any]:
        """The integers plus 128 of four inputs for all outputs."""
        name = "llvm.x86.avx512.pshuf.b.512" if WIDTH == 16 else "llvm.x86.avx2.pshuf.b"
        choose = _function(builder, name, _QUADS, [_QUADS, _QUADS])
        return [builder.call(choose, [self._table, index]) for index in _nibbles(builder, codes)]


class _PlainCodes:
    """4-bit codes that represent consecutive integers, with outputs in `INTERLEAVED` order."""

    def __init__(self, builder: Any, data: Any) -> None:
        self.offset = builder.zext(builder.load(data), _INT)
        """The integers are the codes minus this number."""

    def select(self, builder: Any, place: Any) -> list[Any]:
        """The codes of all outputs for one pair of inputs, in 16 bits. Each output's two codes are adjacent."""
        zeros = ir.Constant(_PACKED, [0] * OUTPUTS)
        lanes_type = ir.VectorType(_INT, OUTPUTS)
        selected = []
        for codes in _nibbles(builder, [builder.load(builder.bitcast(place, _PACKED.as_pointer()), align=1)]):
            for begin in (0, 8):
                # Shuffles of AVX2 that stay in their half of a register are faster than `vpmovzxbw`.
                lanes = [at for half in (0, 16) for byte in range(8) for at in (half + begin + byte, OUTPUTS)]
                widened = builder.shuffle_vector(codes, zeros, ir.Constant(lanes_type, lanes))
                selected.append(builder.bitcast(widened, _PAIRS))
        return selected

    def select_bytes(self, builder: Any, codes: list[Any]) -> list[Any]:
        """The codes of four inputs for all outputs, as bytes."""
        return _nibbles(builder, codes)


def table_of(context: Any, builder: Any, table: Any, array: Any, is_bytes: bool = False) -> Any:
    """The decoder of 4-bit codes for `x` in 8 bits (`is_bytes`) or 16 bits, or None if the codes have 8 bits."""
    if not isinstance(table, types.Array):
        return None
    data = make_array(table)(context, builder, array).data
    if table.dtype == types.uint8:
        return _PlainCodes(builder, data)
    return (_ByteTable if is_bytes else _Table)(builder, data, table.dtype)


def offset_of(lookup: Any, is_bytes: bool) -> Any:
    """The number by which the integers that are multiplied exceed the weight's integers, as an int32 value."""
    if isinstance(lookup, _PlainCodes):
        return lookup.offset
    return _INT(UNSIGNED if is_bytes else 0)


def emit_weights(builder: Any, codes: Any, k: Any, lookup: _Table | _PlainCodes | None) -> list[Any]:
    """The weights of all outputs for the `k`-th pair of inputs, as integers.

    Each output's two weights are adjacent. Also prefetches later codes.
    """
    place = builder.gep(codes, [builder.mul(k, _LONG(2 * OUTPUTS if lookup is None else OUTPUTS))])
    emit_prefetch(builder, builder.gep(place, [_LONG(AHEAD_BYTES)]), FIRST_CACHE)
    if lookup is not None:
        return lookup.select(builder, place)
    return [builder.sext(lanes, _PAIRS) for lanes in emit_loads(builder, place, ir.VectorType(_BYTE, 2 * WIDTH), 1)]


def emit_quads(builder: Any, codes: Any, k: Any, lookup: _ByteTable | _PlainCodes | None) -> list[Any]:
    """The integers of inputs `[4 * k, 4 * k + 4)` for all outputs, as unsigned bytes. Also prefetches later codes."""
    pair_bytes = 2 * OUTPUTS if lookup is None else OUTPUTS
    pairs = ir.VectorType(_HALF, pair_bytes // 2)
    first = builder.gep(codes, [builder.mul(k, _LONG(2 * pair_bytes))])
    loaded = []
    for place in (first, builder.gep(first, [_LONG(pair_bytes)])):
        emit_prefetch(builder, builder.gep(place, [_LONG(AHEAD_BYTES)]), FIRST_CACHE)
        loaded.append(builder.load(builder.bitcast(place, pairs.as_pointer()), align=1))
    quads = []
    order = INTERLEAVED if isinstance(lookup, _PlainCodes) else range(pairs.count)
    for begin in range(0, pairs.count, WIDTH):
        mixed = [at for o in order[begin : begin + WIDTH] for at in (o, pairs.count + o)]
        both = builder.shuffle_vector(*loaded, ir.Constant(ir.VectorType(_INT, 2 * WIDTH), mixed))
        quads.append(builder.bitcast(both, _QUADS))
    return [_plus_128(builder, each) for each in quads] if lookup is None else lookup.select_bytes(builder, quads)


def _nibbles(builder: Any, codes: list[Any]) -> list[Any]:
    """The lower four bits of all bytes, then the upper four bits."""
    lower = [builder.and_(each, ir.Constant(each.type, [15] * each.type.count)) for each in codes]
    return lower + [_shifted(builder, each, 4) for each in codes]


def _plus_128(builder: Any, signed: Any) -> Any:
    return builder.xor(signed, ir.Constant(signed.type, [UNSIGNED] * signed.type.count))


def _shifted(builder: Any, values: Any, bits: int) -> Any:
    return builder.lshr(values, ir.Constant(values.type, [bits] * values.type.count))


def _function(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    known = builder.module.globals.get(name)
    return known or ir.Function(builder.module, ir.FunctionType(result, arguments), name)


def emit_starts(builder: Any, factor_rows: list[Any], offset: Any, part: slice = WHOLE_PANEL) -> list[Any]:
    """`-offset * sum of x[r]` for all rows and the outputs of `part`. `offset` is an int32 value."""
    starts = []
    for row in factor_rows:
        start = _splat(builder, builder.neg(builder.mul(offset, _sum_of(builder, row))))
        starts += [start] * (part.stop - part.start)
    return starts


def _sum_of(builder: Any, factor_row: Any) -> Any:
    return builder.load(builder.inttoptr(builder.add(factor_row, _LONG(4)), _INT.as_pointer()))


def emit_head(
    builder: Any, place: Any, scale_bytes: Any, minimum_bytes: Any, part: slice = WHOLE_PANEL
) -> tuple[list[Any], list[Any]]:
    """The scales and the minima of the outputs of `part`, float32. Without minima, they are 0.

    The scales of a panel's outputs are at `place`, and the minima follow. See `CodePanels` for their sizes.
    """
    half = ir.VectorType(ir.HalfType(), WIDTH)

    def load(at: Any, num_bytes: Any) -> list[Any]:
        def halves() -> list[Any]:
            # One instruction of F16C, which every CPU with AVX2 has.
            return [builder.fpext(each, _FLOATS) for each in emit_loads(builder, at, half, 2)[part]]

        is_half = builder.icmp_signed("==", num_bytes, _LONG(2))
        return _choose(builder, is_half, halves, lambda: emit_loads(builder, at, _FLOATS, 4)[part])

    scales = load(place, scale_bytes)
    after = builder.gep(place, [builder.mul(scale_bytes, _LONG(OUTPUTS))])
    zeros = [ir.Constant(_FLOATS, [0.0] * WIDTH)] * (part.stop - part.start)
    has_minima = builder.icmp_signed("!=", minimum_bytes, _LONG(0))
    return scales, _choose(builder, has_minima, lambda: load(after, minimum_bytes), lambda: zeros)


def _choose(
    builder: Any, condition: Any, then: Callable[[], list[Any]], otherwise: Callable[[], list[Any]]
) -> list[Any]:
    """The values that `then` emits if `condition` is true, or those that `otherwise` emits."""
    blocks = [builder.append_basic_block(name) for name in ("then", "otherwise")]
    done = builder.append_basic_block("chosen")
    builder.cbranch(condition, *blocks)
    found = []
    for block, emit in zip(blocks, (then, otherwise), strict=True):
        builder.position_at_end(block)
        values = emit()
        found.append((builder.block, values))
        builder.branch(done)
    builder.position_at_end(done)
    chosen = []
    for each in zip(*(values for _, values in found), strict=True):
        value = builder.phi(each[0].type)
        for (block, _), one in zip(found, each, strict=True):
            value.add_incoming(one, block)
        chosen.append(value)
    return chosen


def emit_loads(builder: Any, place: Any, lanes: Any, element_bytes: int) -> list[Any]:
    """Load one value for each output, in registers of type `lanes`."""
    places = [builder.gep(place, [_LONG(element_bytes * lanes.count * part)]) for part in range(REGISTERS)]
    return [builder.load(builder.bitcast(each, lanes.as_pointer()), align=1) for each in places]


def _splat(builder: Any, scalar: Any) -> Any:
    first = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), scalar, _INT(0))
    return builder.shuffle_vector(first, first, ir.Constant(_WORDS, [0] * WIDTH))


def emit_sums(
    builder: Any, x: list[Any], weights_at: Emit, num_words: Any, starts: list[Any], is_bytes: bool
) -> list[Any]:
    """`starts` plus the products of all words of `x` and their weights. The integer sums stay in registers.

    `weights_at(k)` returns the weights of the block's outputs for the `k`-th word.
    """
    x_rows = [builder.inttoptr(row, _INT.as_pointer()) for row in x]
    entry = builder.block
    body, after = builder.append_basic_block("words"), builder.append_basic_block("summed")
    builder.branch(body)
    builder.position_at_end(body)
    k = builder.phi(_LONG)
    sums = [builder.phi(_WORDS) for _ in starts]
    dot = _emit_dot
    if is_bytes:
        dot = _emit_byte_dot if HAS_VNNI else _emit_byte_dots
    num_together = BYTE_WORDS if is_bytes and not HAS_VNNI else 1
    places = [builder.add(k, _LONG(number)) for number in range(num_together)]
    totals = []
    weights = list(zip(*(weights_at(place) for place in places), strict=True))
    for row, x_row in enumerate(x_rows):
        words = [_splat(builder, builder.load(builder.gep(x_row, [place]), align=4)) for place in places]
        for part, own in enumerate(weights):
            totals.append(dot(builder, sums[len(weights) * row + part], words, own))
    following = builder.add(k, _LONG(num_together))
    k.add_incoming(_LONG(0), entry)
    k.add_incoming(following, body)
    for value, start, total in zip(sums, starts, totals, strict=True):
        value.add_incoming(start, entry)
        value.add_incoming(total, body)
    builder.cbranch(builder.icmp_signed("<", following, num_words), body, after)
    builder.position_at_end(after)
    return totals


def _emit_dot(builder: Any, total: Any, words: list[Any], weights: Sequence[Any]) -> Any:
    """`total + pair[0] * weight[0] + pair[1] * weight[1]` in each lane."""
    (pair,), (weight,) = words, weights
    if HAS_VNNI:
        name = f"llvm.x86.avx512.vpdpwssd.{32 * WIDTH}"
        dot = _function(builder, name, _WORDS, [_WORDS] * 3)
        return builder.call(dot, [total, pair, builder.bitcast(weight, _WORDS)])
    name = "llvm.x86.avx512.pmaddw.d.512" if WIDTH == 16 else "llvm.x86.avx2.pmadd.wd"
    dot = _function(builder, name, _WORDS, [_PAIRS, _PAIRS])
    return builder.add(total, builder.call(dot, [builder.bitcast(pair, _PAIRS), weight]))


def _emit_byte_dot(builder: Any, total: Any, words: list[Any], weights: Sequence[Any]) -> Any:
    """`total` plus the products of the four signed bytes of `word` and the unsigned bytes of `weight` in each lane."""
    (word,), (weight,) = words, weights
    dot = _function(builder, f"llvm.x86.avx512.vpdpbusd.{32 * WIDTH}", _WORDS, [_WORDS] * 3)
    return builder.call(dot, [total, builder.bitcast(weight, _WORDS), word])


def _emit_byte_dots(builder: Any, total: Any, words: list[Any], weights: Sequence[Any]) -> Any:
    """`_emit_byte_dot` of BYTE_WORDS words with AVX2, for plain codes."""
    dot = _function(builder, "llvm.x86.avx2.pmadd.ub.sw", _PAIRS, [_QUADS, _QUADS])
    sums = [
        builder.call(dot, [weight, builder.bitcast(word, _QUADS)]) for word, weight in zip(words, weights, strict=True)
    ]
    while len(sums) > 1:
        sums = [builder.add(first, second) for first, second in zip(sums[::2], sums[1::2], strict=True)]
    ones = ir.Constant(_PAIRS, [1] * _PAIRS.count)
    widened = builder.call(_function(builder, "llvm.x86.avx2.pmadd.wd", _WORDS, [_PAIRS, _PAIRS]), [sums[0], ones])
    return builder.add(total, widened)


def emit_scaled(
    builder: Any, sums: list[Any], factor_row: Any, scales: list[Any], minima: list[Any], y: list[Any]
) -> list[Any]:
    """`y[o] + factor * (scale[o] * sums[o] + minimum[o] * sum of x)` for the outputs of one row."""
    factor = builder.load(builder.inttoptr(factor_row, _FLOAT.as_pointer()))
    shift = builder.fmul(factor, builder.sitofp(_sum_of(builder, factor_row), _FLOAT), flags=_CONTRACT)
    factors, shifts = emit_splat(builder, factor, WIDTH), emit_splat(builder, shift, WIDTH)
    added = []
    for total, scale, minimum, before in zip(sums, scales, minima, y, strict=True):
        scaled = builder.fmul(factors, scale, flags=_CONTRACT)
        shifted = emit_multiply_add(builder, minimum, shifts, before)
        added.append(emit_multiply_add(builder, builder.sitofp(total, _FLOATS), scaled, shifted))
    return added


def emit_outputs(
    builder: Any,
    sums: list[Any],
    factor_rows: list[Any],
    scales: list[Any],
    minima: list[Any],
    y: list[Any],
    part: slice = WHOLE_PANEL,
) -> None:
    """Add `emit_scaled` to the outputs of `part`, in all rows."""
    for row, (factor_row, y_row) in enumerate(zip(factor_rows, y, strict=True)):
        first = builder.inttoptr(y_row, _FLOATS.as_pointer())
        places = [builder.gep(first, [_LONG(register)]) for register in range(part.start, part.stop)]
        before = [builder.load(place, align=4) for place in places]
        own = sums[len(scales) * row : len(scales) * (row + 1)]
        added = emit_scaled(builder, own, factor_row, scales, minima, before)
        for place, value in zip(places, added, strict=True):
            builder.store(value, place, align=4)
