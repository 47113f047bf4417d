"""bfloat16 products with AVX512_BF16: one instruction multiplies two adjacent inputs for sixteen outputs.

A weight is laid out in panels of 32 outputs, ordered by pairs of inputs: `[panels, in_features / 2, 32, 2]`. Each pair
of inputs of a row is then one 32-bit word, which is broadcast to all outputs. Sums are float32 (Intel, "Intrinsics
Guide", `_mm512_dpbf16_ps`). The order of summation does not depend on the number of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import prange, types
from numba.np.arrayobj import make_array
from torch.nn import functional

from loramux.kernels.cpu.instructions.arrays import array, rows_of
from loramux.kernels.cpu.instructions.blocks import begin_outputs, emit_rows
from loramux.kernels.cpu.instructions.compiled import helper, intrinsic, kernel
from loramux.kernels.cpu.instructions.vectors import (
    FIRST_CACHE,
    SECOND_CACHE,
    emit_prefetch,
    floats_at,
    halves_at,
    narrow,
)

OUTPUTS = 32
"""Outputs in a panel: two AVX-512 registers per row."""

MAX_ROWS = 12
"""Maximum number of rows per block. Their sums take 24 of the 32 registers."""

BLOCK_INPUTS = 256
"""Inputs in a block of a panel. The block, 16 KiB, stays in the L1 cache while all rows are multiplied by it."""

ROW_PAD = 32
"""Padding elements between rows of `x`, and between rows of `y` if there are many. Without padding, rows whose length
is a power of two would all map to one cache set."""

MANY_ROWS = 64

SERIAL_WORK = 500_000
"""Number of multiplications below which waking other threads costs more than it saves."""

SERIAL_ROUNDING = 100_000
"""Number of elements to round below which waking other threads costs more than it saves."""

_ROW_LINES = 2 * BLOCK_INPUTS // 64
"""Cache lines that a row of `x` occupies in a block. MAX_ROWS rows occupy fewer lines than the block has pairs of
inputs, so prefetching one line per pair covers the next rows.
"""

_LANES = 16
_FLOATS = ir.VectorType(ir.FloatType(), _LANES)
_WORDS = ir.VectorType(ir.IntType(32), _LANES)
_INT = ir.IntType(32)
_LONG = ir.IntType(64)


class Avx512Bf16Panels:
    """`y = x @ weightᵀ + bias` for a bfloat16 weight `[out_features, in_features]`. `x` is rounded to bfloat16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features = weight.shape[0]
        self.panels, self.num_panels, self.bias = pair_panels(weight, bias, 2)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows, in_features = x.shape
        rounded = torch.empty(num_rows, in_features + in_features % 2 + ROW_PAD, dtype=torch.bfloat16)
        y = torch.empty(num_rows, self.num_panels * OUTPUTS + (ROW_PAD if num_rows >= MANY_ROWS else 0))
        multiply_pair_panels(
            *rows_of(x), num_rows, in_features, rounded.data_ptr(), rounded.shape[1],
            self.panels, self.num_panels, self.bias.data_ptr(), *rows_of(y),
        )  # fmt: skip
        return y[:, : self.out_features]


def pair_panels(
    weight: torch.Tensor, bias: torch.Tensor | None, multiple: int
) -> tuple[npt.NDArray[np.uint16], int, torch.Tensor]:
    """Lay out a weight `[out_features, in_features]`. Return the panels, their number and the float32 bias.

    Inputs are padded with 0 to a multiple of `multiple`. Outputs and bias are padded with 0 to whole panels. A bias of
    None becomes 0.
    """
    panels = pair_panels_of(weight, multiple)
    added = torch.zeros(panels.shape[0] * OUTPUTS)
    if bias is not None:
        added[: weight.shape[0]] = bias
    return array(panels.view(-1), torch.bfloat16), panels.shape[0], added


def pair_panels_of(weight: torch.Tensor, multiple: int) -> torch.Tensor:
    """Rearrange a weight `[out_features, in_features]` as `[panels, inputs / 2, 32, 2]`, padded with 0."""
    out_features, in_features = weight.shape
    missing = (0, -in_features % multiple, 0, -out_features % OUTPUTS)
    whole = functional.pad(weight, missing) if any(missing) else weight
    return whole.reshape(whole.shape[0] // OUTPUTS, OUTPUTS, -1, 2).transpose(1, 2).contiguous()


@intrinsic
def add_pairs(
    typing_context: Any,
    num_rows: Any,
    x: Any,
    x_step: Any,
    panels: Any,
    first: Any,
    num_pairs: Any,
    ahead: Any,
    also_ahead: Any,
    y: Any,
    y_step: Any,
) -> Any:
    """`y[r][o] += sum over k of x[r][k] * panels[first + 64 * (k // 2) + 2 * o + k % 2]`, for 1 to 12 rows.

    `x` and `y` are addresses, with steps in bytes. `num_pairs` >= 1 is the number of pairs of inputs `k`. The call also
    prefetches `num_pairs` cache lines of `panels` from `ahead` on and as many from `also_ahead` on.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        num_rows, x, x_step, array, first, num_pairs, ahead, also_ahead, y, y_step = args
        data = make_array(panels)(context, builder, array).data
        panel, *fetched = (
            builder.bitcast(builder.gep(data, [place]), _WORDS.as_pointer()) for place in (first, ahead, also_ahead)
        )

        def emit(x_rows: Any, y_rows: Any) -> None:
            _emit_block(builder, x_rows, x_step, panel, num_pairs, fetched, y_rows)

        emit_rows(builder, MAX_ROWS, num_rows, x, x_step, y, y_step, emit)
        return context.get_dummy_value()

    long = types.int64
    return types.none(long, long, long, panels, long, long, long, long, long, long), generate


def _emit_block(
    builder: Any, x: list[Any], x_step: Any, panel: Any, num_pairs: Any, fetched: list[Any], y: list[Any]
) -> None:
    """Emit code for one block of rows, whose sums stay in registers during the loop over pairs.

    The loop also prefetches the data needed next: weights from memory and, with many rows, `x` from the L3 cache.
    """
    x_rows = [builder.inttoptr(row, _INT.as_pointer()) for row in x]
    y_rows = [builder.inttoptr(row, _FLOATS.as_pointer()) for row in y]
    places = [builder.gep(row, [_LONG(half)]) for row in y_rows for half in range(2)]
    before = [builder.load(place, align=4) for place in places]
    product = _product_of_pairs(builder.module)
    entry = builder.block
    body, after = builder.append_basic_block("pairs"), builder.append_basic_block("stored")
    builder.branch(body)
    builder.position_at_end(body)
    k = builder.phi(_LONG)
    sums = [builder.phi(_FLOATS) for _ in before]
    weights = [
        builder.load(builder.gep(panel, [builder.add(builder.shl(k, _LONG(1)), _LONG(half))]), align=4)
        for half in range(2)
    ]
    for place in fetched:
        emit_prefetch(builder, builder.gep(place, [k]), FIRST_CACHE)
    # Also prefetch one cache line of the next block of rows.
    next_row = builder.add(builder.lshr(k, _LONG(_ROW_LINES.bit_length() - 1)), _LONG(len(x)))
    line = builder.and_(k, _LONG(_ROW_LINES - 1))
    next_x = builder.add(builder.add(x[0], builder.mul(x_step, next_row)), builder.shl(line, _LONG(6)))
    emit_prefetch(builder, builder.inttoptr(next_x, _INT.as_pointer()), SECOND_CACHE)
    totals = []
    for row, x_row in enumerate(x_rows):
        word = builder.load(builder.gep(x_row, [k]), align=4)
        first = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), word, _INT(0))
        pair = builder.shuffle_vector(first, first, ir.Constant(_WORDS, [0] * _LANES))
        totals += [builder.call(product, [sums[2 * row + half], pair, weights[half]]) for half in range(2)]
    following = builder.add(k, _LONG(1))
    k.add_incoming(_LONG(0), entry)
    k.add_incoming(following, body)
    for value, start, total in zip(sums, before, totals, strict=True):
        value.add_incoming(start, entry)
        value.add_incoming(total, body)
    builder.cbranch(builder.icmp_signed("<", following, num_pairs), body, after)
    builder.position_at_end(after)
    for place, total in zip(places, totals, strict=True):
        builder.store(total, place, align=4)


def _product_of_pairs(module: Any) -> Any:
    """Declare `sums + a[0] * b[0] + a[1] * b[1]`, with pairs as 32-bit words, which every version of LLVM accepts."""
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    known = module.globals.get(name)
    return known or ir.Function(module, ir.FunctionType(_FLOATS, (_FLOATS, _WORDS, _WORDS)), name)


@helper
def round_row(x_address: int, in_features: int, out_address: int, size: int) -> None:
    x, out = floats_at(x_address), halves_at(out_address)
    for i in range(in_features):
        out[i] = narrow(out, x[i])
    for i in range(in_features, size):
        out[i] = np.uint16(0)


@kernel
def round_rows(
    x: int, x_step: int, num_rows: int, in_features: int, rounded: int, rounded_step: int, size: int
) -> None:
    """`rounded[t] = bfloat16(x[t])`, padded with 0 to `size` elements. Arguments are addresses and steps in bytes."""
    if num_rows * in_features < SERIAL_ROUNDING:
        for t in range(num_rows):
            round_row(x + t * x_step, in_features, rounded + t * rounded_step, size)
    else:
        for t in prange(num_rows):
            round_row(x + t * x_step, in_features, rounded + t * rounded_step, size)


@helper
def multiply_panel(
    panel: int, x: int, x_step: int, num_rows: int, num_pairs: int, panels: Any, bias: int, y: int, y_step: int
) -> None:
    """Compute the 32 outputs of one panel for all rows."""
    y_panel = y + 4 * OUTPUTS * panel
    begin_outputs(y_panel, y_step, num_rows, OUTPUTS, bias + 4 * OUTPUTS * panel)
    num_blocks = (num_rows + MAX_ROWS - 1) // MAX_ROWS
    for k in range(0, num_pairs, BLOCK_INPUTS // 2):
        size = min(BLOCK_INPUTS // 2, num_pairs - k)
        first = (panel * num_pairs + k) * 2 * OUTPUTS
        half = size * OUTPUTS
        for block in range(num_blocks):
            # Make blocks nearly equal in size, because a small block would read each weight for only a few rows.
            begin, end = num_rows * block // num_blocks, num_rows * (block + 1) // num_blocks
            # The first two blocks of rows each prefetch half of the next part of the weight. A single block prefetches
            # both halves.
            ahead = first + (2 + block) * half if block < 2 else first
            also_ahead = ahead + half if num_blocks == 1 else ahead
            add_pairs(
                end - begin, x + begin * x_step + 4 * k, x_step, panels, first, size, ahead, also_ahead,
                y_panel + begin * y_step, y_step,
            )  # fmt: skip


@kernel
def multiply_pair_panels(
    x: int,
    x_stride: int,
    num_rows: int,
    in_features: int,
    rounded: int,
    rounded_stride: int,
    panels: npt.NDArray[np.uint16],
    num_panels: int,
    bias: int,
    y: int,
    y_stride: int,
) -> None:
    """`y[t] = bfloat16(x[t]) @ weightᵀ + bias`. `x`, `rounded`, `bias` and `y` are addresses.

    `x` and `y` have float32 rows, `x_stride` and `y_stride` elements apart. `bias` and each row of `y` cover
    `num_panels` whole panels. `rounded` is scratch for `num_rows` rows of bfloat16, padded to whole pairs and
    `rounded_stride` elements apart.
    """
    num_pairs = (in_features + 1) // 2
    rounded_step, y_step = 2 * rounded_stride, 4 * y_stride
    round_rows(x, 4 * x_stride, num_rows, in_features, rounded, rounded_step, 2 * num_pairs)
    if num_rows * in_features * num_panels * OUTPUTS < SERIAL_WORK:
        for panel in range(num_panels):
            multiply_panel(panel, rounded, rounded_step, num_rows, num_pairs, panels, bias, y, y_step)
    else:
        for panel in prange(num_panels):
            multiply_panel(np.int64(panel), rounded, rounded_step, num_rows, num_pairs, panels, bias, y, y_step)
