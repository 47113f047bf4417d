"""bfloat16 products with AMX: sixteen rows by sixteen outputs by thirty-two inputs in one instruction.

The weight has the panel layout of `avx512_bf16`. The 32 outputs of a panel form two tiles side by side. During the loop
over the inputs, the sums for up to 32 rows and the 32 outputs of a panel stay in four tiles (Intel, "Architecture
Instruction Set Extensions Programming Reference", on AMX). The order of summation does not depend on the number of
rows.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import prange, types
from numba.core import cgutils
from numba.np.arrayobj import make_array

from loramux.kernels.cpu.instructions.arrays import rows_of
from loramux.kernels.cpu.instructions.avx512_bf16 import OUTPUTS, ROW_PAD, SERIAL_WORK, pair_panels, round_rows
from loramux.kernels.cpu.instructions.compiled import cpu_features, helper, intrinsic, kernel
from loramux.kernels.cpu.instructions.vectors import SECOND_CACHE, emit_prefetch

TILE = 16
"""Number of rows, and of outputs, per tile."""

TILE_INPUTS = 32
"""Number of inputs that one instruction multiplies: one tile row of 64 bytes."""

MAX_ROWS = 2 * TILE
"""Maximum number of rows per block. Their sums take four of the eight tiles."""

STEP_ELEMENTS = TILE_INPUTS * OUTPUTS
"""Number of weights of a panel that one step uses: 2 KiB."""

BLOCK_STEPS = 8
"""Steps in a block of a panel. The block, 16 KiB, stays in the L1 cache while all rows are multiplied by it."""

CHUNK_ROW_STEPS = 1 << 14
"""Rows times steps in a chunk of the inputs. The chunk, 1 MiB, stays in the L2 cache while all panels use it."""

STEPS_AHEAD = 2
"""Weights that are read only once are prefetched this many steps ahead."""

TILE_PERMISSION = (158, 0x1023, 18)
"""The system call `arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)` of x86-64 (Linux,
Documentation/arch/x86/xstate.rst)."""

_FIRST_A, _FIRST_B = 4, 6
_BYTE = ir.IntType(8)
_LONG = ir.IntType(64)
_POINTER = _BYTE.as_pointer()
_VOID = ir.VoidType()


@functools.cache
def has_amx() -> bool:
    """True if this CPU has AMX for bfloat16 and Linux lets this process use it. Linux grants the permission for the
    life of the process.
    """
    if "amx-bf16" not in cpu_features() or platform.system() != "Linux":
        return False
    return bool(ctypes.CDLL(None).syscall(*TILE_PERMISSION) == 0)


class AmxPanels:
    """`y = x @ weightᵀ + bias` for a bfloat16 weight `[out_features, in_features]`. `x` is rounded to bfloat16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, in_features = weight.shape
        self._num_steps = -(-in_features // TILE_INPUTS)
        self.panels, self.num_panels, self.bias = pair_panels(weight, bias, TILE_INPUTS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows, in_features = x.shape
        # Pad large batches to whole tiles, so that the tiles are configured only once. The padding rows are
        # uninitialised, and their results are discarded.
        room = num_rows if num_rows <= MAX_ROWS else num_rows + -num_rows % TILE
        rounded = torch.empty(room, self._num_steps * TILE_INPUTS + ROW_PAD, dtype=torch.bfloat16)
        y = torch.empty(room, self.num_panels * OUTPUTS + ROW_PAD)
        multiply_tile_panels(
            torch.get_num_threads(), *rows_of(x), num_rows, in_features, rounded.data_ptr(), rounded.shape[1],
            self.panels, self.num_panels, self._num_steps, self.bias.data_ptr(), *rows_of(y),
        )  # fmt: skip
        return y[:num_rows, : self.out_features]


def emit_call(builder: Any, name: str, arguments: list[Any]) -> None:
    """Call an LLVM intrinsic that returns nothing."""
    name = f"llvm.x86.{name}"
    kind = ir.FunctionType(_VOID, [argument.type for argument in arguments])
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    builder.call(function, arguments)


@intrinsic
def configure_tiles(typing_context: Any, first_rows: Any, second_rows: Any) -> Any:
    """Configure and zero the tiles for groups of `first_rows` and `second_rows` rows, 1 to 16 each."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first, second = (builder.trunc(rows, _BYTE) for rows in args)
        rows = [first, first, second, second, first, second, _BYTE(TILE), _BYTE(TILE)]
        memory = cgutils.alloca_once(builder, ir.ArrayType(_BYTE, 64))
        builder.store(ir.Constant(memory.type.pointee, [1] + [0] * 63), memory)
        start = builder.bitcast(memory, _POINTER)
        for tile, count in enumerate(rows):
            builder.store(_BYTE(2 * TILE_INPUTS), builder.gep(start, [_LONG(16 + 2 * tile)]))
            builder.store(count, builder.gep(start, [_LONG(48 + tile)]))
        emit_call(builder, "ldtilecfg", [start])
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), generate


@intrinsic
def release_tiles(typing_context: Any) -> Any:
    """Release the tiles, so that Linux does not have to save them on context switches."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit_call(builder, "tilerelease", [])
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def add_tiles(
    typing_context: Any, is_wide: Any, is_fetching: Any, x: Any, x_step: Any, panels: Any, first: Any, num_steps: Any,
    start: Any, start_step: Any, y: Any, y_step: Any,
) -> Any:  # fmt: skip
    """`y[r][o] = start[r][o] + sum over k of x[r][k] * panels[first + 64 * (k // 2) + 2 * o + k % 2]`.

    `r` ranges over the rows that the tiles are configured for (more than 16 if `is_wide`), and `k` over 32 *
    `num_steps` inputs, where `num_steps` >= 1. `x`, `start` and `y` are addresses, and their steps are in bytes. If
    `is_fetching`, weights are prefetched STEPS_AHEAD steps ahead.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        is_wide, is_fetching, x, x_step, array, first, num_steps, *starts_and_sums = args
        data = make_array(panels)(context, builder, array).data
        panel = builder.bitcast(builder.gep(data, [first]), _POINTER)

        def emit(row_tiles: int, steps_ahead: int) -> None:
            _emit_block(builder, row_tiles, steps_ahead, x, x_step, panel, num_steps, *starts_and_sums)

        with builder.if_else(is_wide) as (wide, narrow):
            for branch, row_tiles in ((wide, 2), (narrow, 1)):
                with branch, builder.if_else(is_fetching) as (fetching, present):
                    with fetching:
                        emit(row_tiles, STEPS_AHEAD)
                    with present:
                        emit(row_tiles, 0)
        return context.get_dummy_value()

    flag, long = types.boolean, types.int64
    return types.none(flag, flag, long, long, panels, long, long, long, long, long, long), generate


def _emit_block(
    builder: Any, row_tiles: int, steps_ahead: int, x: Any, x_step: Any, panel: Any, num_steps: Any,
    start: Any, start_step: Any, y: Any, y_step: Any,
) -> None:  # fmt: skip
    def rows_from(address: Any, step: Any, tile: int) -> Any:
        return builder.inttoptr(builder.add(address, builder.mul(step, _LONG(TILE * tile))), _POINTER)

    x_tiles = [rows_from(x, x_step, tile) for tile in range(row_tiles)]
    halves = [(tile, half) for tile in range(row_tiles) for half in range(2)]
    for tile, half in halves:
        place = builder.gep(rows_from(start, start_step, tile), [_LONG(4 * TILE * half)])
        emit_call(builder, "tileloadd64", [_BYTE(2 * tile + half), place, start_step])
    entry = builder.block
    body, after = builder.append_basic_block("steps"), builder.append_basic_block("stored")
    builder.branch(body)
    builder.position_at_end(body)
    k = builder.phi(_LONG)
    weights = builder.gep(panel, [builder.mul(k, _LONG(2 * STEP_ELEMENTS))])
    if steps_ahead:
        for line in range(0, 2 * STEP_ELEMENTS, 64):
            later = _LONG(2 * STEP_ELEMENTS * steps_ahead + line)
            emit_prefetch(builder, builder.gep(weights, [later]), SECOND_CACHE)
    for tile, rows in enumerate(x_tiles):
        inputs = builder.gep(rows, [builder.mul(k, _LONG(2 * TILE_INPUTS))])
        emit_call(builder, "tileloadd64", [_BYTE(_FIRST_A + tile), inputs, x_step])
    for half in range(2):
        columns = builder.gep(weights, [_LONG(4 * TILE * half)])
        emit_call(builder, "tileloadd64", [_BYTE(_FIRST_B + half), columns, _LONG(4 * OUTPUTS)])
        for tile in range(row_tiles):
            emit_call(builder, "tdpbf16ps", [_BYTE(2 * tile + half), _BYTE(_FIRST_A + tile), _BYTE(_FIRST_B + half)])
    following = builder.add(k, _LONG(1))
    k.add_incoming(_LONG(0), entry)
    k.add_incoming(following, body)
    builder.cbranch(builder.icmp_signed("<", following, num_steps), body, after)
    builder.position_at_end(after)
    for tile, half in halves:
        place = builder.gep(rows_from(y, y_step, tile), [_LONG(4 * TILE * half)])
        emit_call(builder, "tilestored64", [_BYTE(2 * tile + half), place, y_step])


@helper
def _multiply_few_rows(
    begin: int, end: int, x: int, x_step: int, num_rows: int, num_steps: int, panels: Any, bias: int, y: int,
    y_step: int,
) -> None:  # fmt: skip
    """Compute the outputs of panels `[begin, end)` for 1 to 32 rows. The weight is read once, sequentially."""
    configure_tiles(min(num_rows, TILE), max(1, num_rows - TILE))
    for panel in range(begin, end):
        column = 4 * OUTPUTS * panel
        # A step of 0 makes every row start with the bias.
        add_tiles(
            num_rows > TILE, True, x, x_step, panels, panel * num_steps * STEP_ELEMENTS, num_steps,
            bias + column, 0, y + column, y_step,
        )  # fmt: skip


@helper
def _multiply_many_rows(
    begin: int, end: int, x: int, x_step: int, num_rows: int, num_steps: int, panels: Any, bias: int, y: int,
    y_step: int,
) -> None:  # fmt: skip
    """Compute the outputs of panels `[begin, end)` for whole tiles of rows.

    While a chunk of the rows' inputs is in the L2 cache, it is multiplied by all panels. While a block of a panel is in
    the L1 cache, all rows are multiplied by it.
    """
    chunk_steps = max(BLOCK_STEPS, CHUNK_ROW_STEPS // num_rows // BLOCK_STEPS * BLOCK_STEPS)
    configure_tiles(TILE, TILE)
    for chunk in range(0, num_steps, chunk_steps):
        chunk_end = min(num_steps, chunk + chunk_steps)
        for panel in range(begin, end):
            column = 4 * OUTPUTS * panel
            for k in range(chunk, chunk_end, BLOCK_STEPS):
                size = min(BLOCK_STEPS, chunk_end - k)
                for t in range(0, num_rows, MAX_ROWS):
                    y_rows = y + t * y_step + column
                    add_tiles(
                        num_rows - t > TILE, False, x + t * x_step + 2 * TILE_INPUTS * k, x_step,
                        panels, (panel * num_steps + k) * STEP_ELEMENTS, size,
                        bias + column if k == 0 else y_rows, 0 if k == 0 else y_step, y_rows, y_step,
                    )  # fmt: skip


@helper
def multiply_share(
    begin: int, end: int, x: int, x_step: int, num_rows: int, num_steps: int, panels: Any, bias: int, y: int,
    y_step: int,
) -> None:  # fmt: skip
    """Compute the outputs of panels `[begin, end)` for all rows. The thread has no tiles before and after."""
    if num_rows <= MAX_ROWS:
        _multiply_few_rows(begin, end, x, x_step, num_rows, num_steps, panels, bias, y, y_step)
    else:
        whole = (num_rows + TILE - 1) // TILE * TILE
        _multiply_many_rows(begin, end, x, x_step, whole, num_steps, panels, bias, y, y_step)
    release_tiles()


@kernel
def multiply_tile_panels(
    num_threads: int,
    x: int,
    x_stride: int,
    num_rows: int,
    in_features: int,
    rounded: int,
    rounded_stride: int,
    panels: npt.NDArray[np.uint16],
    num_panels: int,
    num_steps: int,
    bias: int,
    y: int,
    y_stride: int,
) -> None:
    """`y[t] = bfloat16(x[t]) @ weightᵀ + bias`. `x`, `rounded`, `bias` and `y` are addresses.

    `x` and `y` have float32 rows, `x_stride` and `y_stride` elements apart. Rows of `y`, like `bias`, cover
    `num_panels` whole panels. `rounded` is bfloat16 scratch for rows padded to whole steps, `rounded_stride` apart. For
    more than 32 rows, `y` and `rounded` have room for whole tiles of rows. Each of `num_threads` threads processes one
    share of the panels and configures its tiles once.
    """
    rounded_step, y_step, size = 2 * rounded_stride, 4 * y_stride, num_steps * TILE_INPUTS
    round_rows(x, 4 * x_stride, num_rows, in_features, rounded, rounded_step, size)
    if num_rows == 0:
        return
    if num_rows * in_features * num_panels * OUTPUTS < SERIAL_WORK:
        multiply_share(0, num_panels, rounded, rounded_step, num_rows, num_steps, panels, bias, y, y_step)
    else:
        for part in prange(num_threads):
            begin, end = num_panels * part // num_threads, num_panels * (part + 1) // num_threads
            multiply_share(begin, end, rounded, rounded_step, num_rows, num_steps, panels, bias, y, y_step)
