"""Products of many rows with a quantised weight, computed with AMX. The results have the same bits as in
`quantized_linear`.

Tiles multiply 8-bit integers. Each 16-bit integer of `x` is therefore split into two bytes: `256 * upper + lower`,
where `upper` is signed and `lower` is not. Four tiles hold the sums of both halves for up to 16 rows and the 32 outputs
of a panel (Intel, "Architecture Instruction Set Extensions Programming Reference", on AMX). The codes of a block are
unpacked once for all rows.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]
from numba import prange, types
from numba.core import cgutils
from numba.np.arrayobj import make_array

from loramux.kernels.cpu.instructions.amx import TILE, emit_call, has_amx, release_tiles
from loramux.kernels.cpu.instructions.blocks import begin_outputs, emit_loop
from loramux.kernels.cpu.instructions.compiled import cpu_features, helper, intrinsic, kernel
from loramux.kernels.cpu.instructions.integer_blocks import (
    OUTPUTS,
    REGISTERS,
    emit_head,
    emit_outputs,
    emit_weights,
    table_of,
)
from loramux.kernels.cpu.instructions.rounded_rows import round_blocks
from loramux.kernels.cpu.instructions.vectors import stack_memory
from loramux.kernels.cpu.linear.quantized_layout import BLOCKS

TILE_INPUTS = 64
"""Maximum number of inputs that one instruction multiplies. A tile row has 64 bytes."""

SERIAL_SPLITTING = 100_000
"""Number of elements to split below which waking other threads costs more than it saves."""

TILES_BYTES = BLOCKS[0] * OUTPUTS
"""Size of the unpacked codes of the largest block, in bytes."""

SUMS_BYTES = 4 * 4 * TILE * TILE
"""Bytes of the sums of one tile of rows: int32 `[16, 16]` for each half of the 32 outputs and each half of `x`."""

_BYTE, _HALF, _INT, _LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_POINTER = _BYTE.as_pointer()
_HALVES = ir.VectorType(_HALF, TILE)
_WORDS = ir.VectorType(_INT, TILE)
_UPPER, _LOWER = 4, 5
"""Tiles of the two halves of `x`. The sums are in tiles 0 to 3, and the codes in tiles 6 and 7."""
_CODES = 6

_scratch = stack_memory(TILES_BYTES + SUMS_BYTES)


@functools.cache
def has_integer_tiles() -> bool:
    # Without the cache, asking LLVM for the features would take as long as a small product.
    return "amx-int8" in cpu_features() and has_amx()


@intrinsic
def _configure(typing_context: Any, num_rows: Any, num_inputs: Any) -> Any:
    """Configure the tiles for `num_rows` <= 16 rows, 32 outputs and `num_inputs` <= 64 inputs."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, num_inputs = (builder.trunc(number, _BYTE) for number in args)
        quads = builder.lshr(num_inputs, _BYTE(2))
        memory = cgutils.alloca_once(builder, ir.ArrayType(_BYTE, 64))
        builder.store(ir.Constant(memory.type.pointee, [1] + [0] * 63), memory)
        start = builder.bitcast(memory, _POINTER)
        for tile in range(8):
            width = num_inputs if tile in (_UPPER, _LOWER) else _BYTE(4 * TILE)
            builder.store(width, builder.gep(start, [_LONG(16 + 2 * tile)]))
            builder.store(quads if tile >= _CODES else num_rows, builder.gep(start, [_LONG(48 + tile)]))
        emit_call(builder, "ldtilecfg", [start])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@intrinsic
def _unpack(typing_context: Any, panels: Any, codes: Any, table: Any, num_pairs: Any, tiles: Any) -> Any:
    """Write the integers of a block as `[2, num_pairs / 2, 16 outputs, 4 inputs]` bytes to the address `tiles`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, codes, table_array, num_pairs, tiles = args
        place = builder.gep(make_array(panels)(context, builder, array).data, [codes])
        lookup = table_of(context, builder, table, table_array)
        out = builder.inttoptr(tiles, _POINTER)
        half_bytes = builder.mul(num_pairs, _LONG(2 * TILE))
        mixed = ir.Constant(ir.VectorType(_INT, 2 * TILE), [at for o in range(TILE) for at in (o, TILE + o)])
        quads = ir.VectorType(_HALF, 2 * TILE)

        def step(k: Any, values: list[Any]) -> list[Any]:
            pairs = []
            for at in (k, builder.add(k, _LONG(1))):
                weights = emit_weights(builder, place, at, lookup)
                bytes_type = ir.VectorType(_BYTE, 2 * TILE)
                pairs.append([builder.bitcast(builder.trunc(weight, bytes_type), _HALVES) for weight in weights])
            for half, (first, second) in enumerate(zip(*pairs, strict=True)):
                at = builder.add(builder.mul(half_bytes, _LONG(half)), builder.mul(k, _LONG(2 * TILE)))
                stored = builder.bitcast(builder.gep(out, [at]), quads.as_pointer())
                builder.store(builder.shuffle_vector(first, second, mixed), stored, align=1)
            return values

        emit_loop(builder, num_pairs, 2, [], step)
        return context.get_dummy_value()

    return types.none(panels, types.int64, table, types.int64, types.int64), generate


@intrinsic
def _add_tiles(
    typing_context: Any, x: Any, x_step: Any, lower: Any, tiles: Any, size: Any, num_inputs: Any, sums: Any
) -> Any:
    """Write the sums of one tile of rows and one block of `size` inputs to `sums`. A tile holds `num_inputs` inputs of
    each row.

    `x` is the address of the upper halves; the lower halves begin `lower` bytes after it.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, x_step, lower, tiles, size, num_inputs, sums = args
        # A tile's number is part of the instruction, so LLVM's register allocator does not choose the tiles.
        for tile in range(4):
            emit_call(builder, "tilezero", [_BYTE(tile)])

        def pointer(address: Any) -> Any:
            return builder.inttoptr(address, _POINTER)

        entry = builder.block
        body, after = builder.append_basic_block("steps"), builder.append_basic_block("stored")
        builder.branch(body)
        builder.position_at_end(body)
        k = builder.phi(_LONG)
        upper_place = builder.add(x, k)
        emit_call(builder, "tileloadd64", [_BYTE(_UPPER), pointer(upper_place), x_step])
        emit_call(builder, "tileloadd64", [_BYTE(_LOWER), pointer(builder.add(upper_place, lower)), x_step])
        for half in range(2):
            inputs = builder.add(builder.mul(size, _LONG(half)), k)
            place = builder.add(tiles, builder.mul(inputs, _LONG(TILE)))
            emit_call(builder, "tileloadd64", [_BYTE(_CODES + half), pointer(place), _LONG(4 * TILE)])
            # The upper byte of an input is signed and the lower byte is not, so each has its own instruction and sums.
            emit_call(builder, "tdpbssd", [_BYTE(half), _BYTE(_UPPER), _BYTE(_CODES + half)])
            emit_call(builder, "tdpbusd", [_BYTE(2 + half), _BYTE(_LOWER), _BYTE(_CODES + half)])
        following = builder.add(k, num_inputs)
        k.add_incoming(_LONG(0), entry)
        k.add_incoming(following, body)
        builder.cbranch(builder.icmp_signed("<", following, size), body, after)
        builder.position_at_end(after)
        for tile in range(4):
            place = builder.add(sums, _LONG(4 * TILE * TILE * tile))
            emit_call(builder, "tilestored64", [_BYTE(tile), pointer(place), _LONG(4 * TILE)])
        return context.get_dummy_value()

    long = types.int64
    return types.none(long, long, long, long, long, long, long), generate


@intrinsic
def _add_outputs(
    typing_context: Any, sums: Any, factors: Any, factor_step: Any, panels: Any, head: Any, scale_bytes: Any,
    minimum_bytes: Any, y: Any, y_step: Any, num_rows: Any,
) -> Any:  # fmt: skip
    """Add the products of a block to `y` as `add_codes` does, where the sums are `256 * upper sum + lower sum`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, factors, factor_step, array, head, scale_bytes, minimum_bytes, y, y_step, num_rows = args
        head_place = builder.gep(make_array(panels)(context, builder, array).data, [head])
        scales, minima = emit_head(builder, head_place, scale_bytes, minimum_bytes)
        first = builder.inttoptr(sums, _WORDS.as_pointer())

        def step(r: Any, values: list[Any]) -> list[Any]:
            factor_row = builder.add(factors, builder.mul(factor_step, r))
            totals = []
            for half in range(REGISTERS):
                upper, lower = (
                    builder.load(builder.gep(first, [builder.add(r, _LONG(TILE * (2 * part + half)))]), align=4)
                    for part in range(2)
                )
                shifted = builder.shl(upper, ir.Constant(_WORDS, [8] * TILE))
                totals.append(builder.add(shifted, lower))
            emit_outputs(builder, totals, [factor_row], scales, minima, [builder.add(y, builder.mul(y_step, r))])
            return values

        emit_loop(builder, num_rows, 1, [], step)
        return context.get_dummy_value()

    long = types.int64
    return types.none(long, long, long, panels, long, long, long, long, long, long), generate


@intrinsic
def split(typing_context: Any, x: Any, size: Any, upper: Any, lower: Any) -> Any:
    """Split `size` int16 values into signed upper and unsigned lower bytes. `size` is a multiple of 16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        x, size, *halves = args
        source = builder.inttoptr(x, _HALF.as_pointer())
        outputs = [builder.inttoptr(address, _POINTER) for address in halves]
        bytes_type = ir.VectorType(_BYTE, TILE)

        def step(k: Any, values: list[Any]) -> list[Any]:
            lanes = builder.load(builder.bitcast(builder.gep(source, [k]), _HALVES.as_pointer()), align=2)
            upper = builder.lshr(lanes, ir.Constant(_HALVES, [8] * TILE))
            for output, part in zip(outputs, (upper, lanes), strict=True):
                place = builder.bitcast(builder.gep(output, [k]), bytes_type.as_pointer())
                builder.store(builder.trunc(part, bytes_type), place, align=1)
            return values

        emit_loop(builder, size, TILE, [], step)
        return context.get_dummy_value()

    long = types.int64
    return types.none(long, long, long, long), generate


@helper
def multiply_share(
    begin: int, end: int, halves: int, half_step: int, lower: int, factors: int, factor_step: int, num_rows: int,
    panels: Any, num_groups: int, group: int, block: int, scale_bytes: int, minimum_bytes: int, table: Any, bias: int,
    y: int, y_step: int,
) -> None:  # fmt: skip
    """Compute the outputs of panels `[begin, end)` for all rows. The thread has no tiles before and after.

    `halves` has whole tiles of rows, `half_step` bytes apart. The lower halves begin `lower` bytes after the upper
    halves.
    """
    tiles = _scratch()
    sums = tiles + TILES_BYTES
    input_bytes = OUTPUTS if table is None else OUTPUTS // 2
    head_bytes = (scale_bytes + minimum_bytes) * OUTPUTS
    num_inputs = min(block, TILE_INPUTS)
    # With as few tiles of rows as possible, make them nearly equal, because instructions take a cycle for each row.
    num_tiles = (num_rows + TILE - 1) // TILE
    tile_rows = (num_rows + num_tiles - 1) // num_tiles
    _configure(tile_rows, num_inputs)
    for panel in range(begin, end):
        y_panel = y + 4 * OUTPUTS * panel
        begin_outputs(y_panel, y_step, num_rows, OUTPUTS, bias + 4 * OUTPUTS * panel)
        for g in range(num_groups):
            head = (panel * num_groups + g) * (head_bytes + group * input_bytes)
            for k in range(g * group, (g + 1) * group, block):
                _unpack(panels, head + head_bytes + (k - g * group) * input_bytes, table, block // 2, tiles)
                for t in range(0, num_rows, tile_rows):
                    _add_tiles(halves + t * half_step + k, half_step, lower, tiles, block, num_inputs, sums)
                    _add_outputs(
                        sums, factors + t * factor_step + 8 * (k // block), factor_step, panels, head, scale_bytes,
                        minimum_bytes, y_panel + t * y_step, y_step, min(tile_rows, num_rows - t),
                    )  # fmt: skip
    release_tiles()


@kernel
def multiply_code_tiles(
    num_threads: int,
    x: int,
    x_stride: int,
    num_rows: int,
    limit: Any,
    rounded: int,
    rounded_stride: int,
    halves: int,
    half_stride: int,
    lower: int,
    factors: int,
    panels: npt.NDArray[np.uint8],
    num_panels: int,
    num_groups: int,
    group: int,
    block: int,
    scale_bytes: int,
    minimum_bytes: int,
    table: npt.NDArray[Any] | None,
    bias: int,
    y: int,
    y_stride: int,
) -> None:
    """Compute `quantized_linear.multiply_codes` with tiles. `num_rows` is at least 1.

    `halves` is scratch for the upper halves of `x`, `[whole tiles of rows, half_stride]` bytes. Scratch of the same
    size for the lower halves begins `lower` bytes after it.
    """
    num_blocks = num_groups * group // block
    x_step, factor_step, y_step = 2 * rounded_stride, 8 * num_blocks, 4 * y_stride
    round_blocks(x, 4 * x_stride, num_rows, num_blocks, block, limit, rounded, x_step, np.int16, factors, factor_step)
    size = num_blocks * block
    if num_rows * size < SERIAL_SPLITTING:
        for t in range(num_rows):
            split(rounded + t * x_step, size, halves + t * half_stride, halves + lower + t * half_stride)
    else:
        for t in prange(num_rows):
            split(rounded + t * x_step, size, halves + t * half_stride, halves + lower + t * half_stride)
    for part in prange(num_threads):
        multiply_share(
            num_panels * part // num_threads, num_panels * (part + 1) // num_threads, halves, half_stride, lower,
            factors, factor_step, num_rows, panels, num_groups, group, block, scale_bytes, minimum_bytes, table, bias,
            y, y_step,
        )  # fmt: skip
