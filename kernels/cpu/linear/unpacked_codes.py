"""Products of many rows with 4-bit codes: the codes of part of a panel are unpacked once for all rows.

`integer_blocks.add_codes` unpacks codes again for every `MAX_ROWS` rows, and reads and writes `y` for every block of
inputs. Here, the unpacked integers stay in the L1 cache while all rows are multiplied, and the outputs of a tile of
rows stay in registers (with AVX2, partly on the stack) until the part ends. The operations on each output and their
order are the same, so the results are bitwise equal.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.np.arrayobj import make_array

from loramux.kernels.cpu.instructions.blocks import emit_loop, emit_rows
from loramux.kernels.cpu.instructions.compiled import helper, intrinsic
from loramux.kernels.cpu.instructions.integer_blocks import (
    HAS_BYTE_TABLES,
    MAX_ROWS,
    OUTPUTS,
    REGISTERS,
    emit_head,
    emit_quads,
    emit_scaled,
    emit_starts,
    emit_sums,
    emit_weights,
    offset_of,
    parts_of_panel,
    table_of,
)
from loramux.kernels.cpu.instructions.rounded_rows import bytes_of
from loramux.kernels.cpu.instructions.vectors import WIDTH, stack_memory

TILE_ROWS = 6
"""Maximum number of rows per tile. With AVX-512, their sums and outputs fit in the registers."""

UNPACK_ROWS = 2 * MAX_ROWS
"""Maximum number of rows for which `add_codes` is always used. With more rows, codes may be unpacked only once."""

LEAST_TILE_ROWS = (UNPACK_ROWS + 1) // -(-(UNPACK_ROWS + 1) // TILE_ROWS)
"""Minimum number of rows per tile if the rows are divided into as few equal tiles as possible."""

UNPACKED_BYTES = 16384
"""Maximum size of the unpacked integers, in bytes: half of an L1 cache of 32 KiB."""

_REGISTER_BYTES = 4 * WIDTH
_BYTE, _LONG = ir.IntType(8), ir.IntType(64)
_FLOATS = ir.VectorType(ir.FloatType(), WIDTH)
_BYTES = ir.VectorType(_BYTE, _REGISTER_BYTES)
_buffer = stack_memory(UNPACKED_BYTES)


@intrinsic
def _unpack(
    typing_context: Any, panels: Any, codes: Any, table: Any, x_type: Any, num_pairs: Any, integers: Any
) -> Any:
    """Write the integers of a block to the address `integers`, in the form that products with `x_type` load."""
    is_bytes = x_type.dtype == types.int8

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, codes, table_array, _, num_pairs, integers = args
        place = builder.gep(make_array(panels)(context, builder, array).data, [codes])
        lookup = table_of(context, builder, table, table_array, is_bytes)
        emit = emit_quads if is_bytes else emit_weights
        first = builder.inttoptr(integers, _BYTES.as_pointer())

        def step(k: Any, values: list[Any]) -> list[Any]:
            for part, weights in enumerate(emit(builder, place, k, lookup)):
                at = builder.gep(first, [builder.add(builder.mul(k, _LONG(REGISTERS)), _LONG(part))])
                builder.store(builder.bitcast(weights, _BYTES), at, align=_REGISTER_BYTES)
            return values

        emit_loop(builder, builder.lshr(num_pairs, _LONG(1)) if is_bytes else num_pairs, 1, [], step)
        return context.get_dummy_value()

    long = types.int64
    return types.none(panels, long, table, x_type, long, long), generate


@intrinsic
def _add_blocks(
    typing_context: Any, num_rows: Any, x: Any, x_step: Any, x_type: Any, factors: Any, factor_step: Any, panels: Any,
    head: Any, scale_bytes: Any, minimum_bytes: Any, table: Any, group_bytes: Any, group_blocks: Any, first: Any,
    integers: Any, num_blocks: Any, num_pairs: Any, y: Any, y_step: Any,
) -> Any:  # fmt: skip
    """Add the products of `num_blocks` unpacked blocks to `y`, as `add_codes` does for one block.

    `head` is the byte offset in `panels` of the first block's group, and `first` is that block's number in its group.
    Each group has `group_blocks` blocks and `group_bytes` bytes.
    """
    is_bytes = x_type.dtype == types.int8
    lanes = ir.VectorType(ir.IntType(8 if is_bytes else 16), _REGISTER_BYTES // (1 if is_bytes else 2))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, x, x_step, _, factors, factor_step, array, head, scale_bytes, minimum_bytes, table_array, *rest = args
        group_bytes, group_blocks, first, integers, num_blocks, num_pairs, y, y_step = rest
        offset = offset_of(table_of(context, builder, table, table_array, is_bytes), is_bytes)
        data = make_array(panels)(context, builder, array).data
        num_words = builder.lshr(num_pairs, _LONG(1)) if is_bytes else num_pairs
        registers = builder.inttoptr(integers, lanes.as_pointer())

        def emit(x_rows: list[Any], y_rows: list[Any]) -> None:
            factor_rows = [builder.add(factors, builder.mul(factor_step, _LONG(r))) for r in range(len(x_rows))]
            for part in parts_of_panel(len(x_rows), has_table=False, is_bytes=is_bytes):
                emit_part(x_rows, y_rows, factor_rows, part)

        def emit_part(x_rows: list[Any], y_rows: list[Any], factor_rows: list[Any], part: slice) -> None:
            rows = [builder.inttoptr(row, _FLOATS.as_pointer()) for row in y_rows]
            numbers = range(part.start, part.stop)
            places = [builder.gep(row, [_LONG(number)]) for row in rows for number in numbers]

            def step(b: Any, values: list[Any]) -> list[Any]:
                group, number, *outputs = values
                factor_places = [builder.add(row, builder.mul(b, _LONG(8))) for row in factor_rows]
                starts = emit_starts(builder, factor_places, offset, part)
                word = builder.mul(b, num_words)
                x_block = [builder.add(row, builder.mul(word, _LONG(4))) for row in x_rows]

                def weights_at(k: Any) -> list[Any]:
                    at = builder.mul(builder.add(word, k), _LONG(REGISTERS))
                    found = [builder.gep(registers, [builder.add(at, _LONG(number))]) for number in numbers]
                    return [builder.load(place, align=_REGISTER_BYTES) for place in found]

                sums = emit_sums(builder, x_block, weights_at, num_words, starts, is_bytes)
                scales, minima = emit_head(builder, builder.gep(data, [group]), scale_bytes, minimum_bytes, part)
                after = []
                for row, place in enumerate(factor_places):
                    own = slice(len(numbers) * row, len(numbers) * (row + 1))
                    after += emit_scaled(builder, sums[own], place, scales, minima, outputs[own])
                following = builder.add(number, _LONG(1))
                is_last = builder.icmp_signed("==", following, group_blocks)
                next_group = builder.select(is_last, builder.add(group, group_bytes), group)
                return [next_group, builder.select(is_last, _LONG(0), following), *after]

            # Carry the group's place and the block's number in the group: computing them from `b` takes a division.
            before = [builder.load(place, align=4) for place in places]
            _, _, *outputs = emit_loop(builder, num_blocks, 1, [head, first, *before], step)
            for place, value in zip(places, outputs, strict=True):
                builder.store(value, place, align=4)

        emit_rows(builder, TILE_ROWS, num_rows, x, x_step, y, y_step, emit, least=LEAST_TILE_ROWS)
        return context.get_dummy_value()

    long = types.int64
    where = (long, long, long, x_type, long, long, panels, long, long, long, table)
    return types.none(*where, *[long] * 8), generate


@helper
def unpacks_once(num_rows: int, kind: Any) -> bool:
    """True if `add_unpacked` is faster than `add_codes` for this many rows of `kind`, np.int16 or np.int8.

    With AVX-512, looking up integers for 16-bit `x` is as fast as loading them.
    """
    return num_rows > UNPACK_ROWS and (HAS_BYTE_TABLES or bytes_of(kind) == 1)


@helper
def add_unpacked(
    place: int, x: int, x_step: int, kind: Any, factors: int, factor_step: int, num_rows: int, panels: Any,
    num_groups: int, group: int, block: int, scale_bytes: int, minimum_bytes: int, table: Any, y: int, y_step: int,
) -> None:  # fmt: skip
    """Add the products of the panel at `place` to more than `UNPACK_ROWS` rows of `y`."""
    head_bytes, input_bytes = (scale_bytes + minimum_bytes) * OUTPUTS, OUTPUTS // 2
    group_bytes, group_blocks = head_bytes + group * input_bytes, group // block
    integers, block_bytes = _buffer(), OUTPUTS * block * bytes_of(kind)
    num_blocks, most = num_groups * group_blocks, UNPACKED_BYTES // block_bytes
    num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    for first in range(0, num_blocks, most):
        count = min(most, num_blocks - first)
        for b in range(count):
            g, number = (first + b) // group_blocks, (first + b) % group_blocks
            codes = place + g * group_bytes + head_bytes + number * block * input_bytes
            _unpack(panels, codes, table, kind, block // 2, integers + b * block_bytes)
        for tile in range(num_tiles):
            begin, end = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
            _add_blocks(
                end - begin, x + begin * x_step + bytes_of(kind) * first * block, x_step, kind,
                factors + begin * factor_step + 8 * first, factor_step, panels,
                place + first // group_blocks * group_bytes, scale_bytes, minimum_bytes, table, group_bytes,
                group_blocks, first % group_blocks, integers, count, block // 2, y + begin * y_step, y_step,
            )  # fmt: skip
