"""Products with a base's weights as operations. Each task computes some panels for all rows.

Unlike in the kernels of `linear/`, `x` is rounded by an operation of its own, once for each row. The helpers and their
order are the same, so the results are bitwise equal.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numba import carray  # type: ignore[attr-defined]

from loramux.kernels.composed_linear import JoinedLinear, ReorderedLinear
from loramux.kernels.cpu.instructions import amx, avx512_bf16
from loramux.kernels.cpu.instructions.amx import AmxPanels
from loramux.kernels.cpu.instructions.arrays import rows_of
from loramux.kernels.cpu.instructions.avx512_bf16 import Avx512Bf16Panels
from loramux.kernels.cpu.instructions.integer_blocks import OUTPUTS
from loramux.kernels.cpu.instructions.rounded_rows import round_row
from loramux.kernels.cpu.instructions.vectors import PANEL, floats_at, pointer_at
from loramux.kernels.cpu.linear import linear as float_panels
from loramux.kernels.cpu.linear import quantized_amx, quantized_linear
from loramux.kernels.cpu.linear.linear import FloatPanels, PackedLinear
from loramux.kernels.cpu.linear.quantized_linear import QuantizedLinear
from loramux.kernels.cpu.programs.operation import Operation, doubles_at, words_at
from loramux.kernels.cpu.programs.tape import Tape
from loramux.kernels.recording import NotRecordable

_UNLIMITED = 1 << 48


def record_product(tape: Tape, linear: Any, x: torch.Tensor) -> torch.Tensor:
    """Record `linear(x)`, and return the rows that will contain the result. Raises NotRecordable."""
    product = linear.product if isinstance(linear, PackedLinear) else linear
    if isinstance(product, ReorderedLinear):
        return record_product(tape, product.linear, _record_order(tape, product.inputs, x))
    if isinstance(product, JoinedLinear):
        y = _record_joined(tape, product, x)
    elif isinstance(product, QuantizedLinear):
        y = _record_codes(tape, product, x)
    elif isinstance(product, AmxPanels | Avx512Bf16Panels):
        y = _record_pairs(tape, product, x)
    elif isinstance(product, FloatPanels):
        y = _record_floats(tape, product, x)
    else:
        raise NotRecordable(f"a product of {type(product).__name__}")
    tape.count_work(x.numel() * y.shape[1])
    return y


@Operation
def _reorder(arguments: Any, step: Any, task: Any) -> None:
    """Words: x, its step, the input of each output, number of outputs, out, its step."""
    words = words_at(arguments)
    row, inputs, out = floats_at(words[0] + task * words[1]), words_at(words[2]), floats_at(words[4] + task * words[5])
    for i in range(words[3]):
        out[i] = row[inputs[i]]


def _record_order(tape: Tape, inputs: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    assert inputs.dtype is torch.int64
    assert inputs.is_contiguous()
    y = tape.rows(len(inputs))
    (address, stride), (out, out_stride) = rows_of(x), rows_of(y)
    tape.for_each_row(_reorder, (address, 4 * stride, inputs.data_ptr(), len(inputs), out, 4 * out_stride))
    tape.own(inputs)
    return y


def _record_joined(tape: Tape, joined: JoinedLinear, x: torch.Tensor) -> torch.Tensor:
    """A product writes whole panels, so no two of the products may share a panel."""
    linears = [one for one in joined.linears if isinstance(one, QuantizedLinear) and not one.out_features % OUTPUTS]
    if len(linears) < len(joined.linears):
        raise NotRecordable("joined products of other weights, or of parts of panels")
    ends = list(accumulate(one.out_features for one in linears))
    # The products may use tiles.
    y = tape.rows(ends[-1] + quantized_linear.ROW_PAD)[:, : ends[-1]]
    for linear, end in zip(linears, ends, strict=True):
        _record_codes(tape, linear, x, y[:, end - linear.out_features : end])
    return y


@Operation
def _round_pairs(arguments: Any, step: Any, task: Any) -> None:
    """Words: x, its step, number of inputs, out, its step, number of elements of a row of `out`."""
    words = words_at(arguments)
    avx512_bf16.round_row(words[0] + task * words[1], words[2], words[3] + task * words[4], words[5])


@Operation
def _multiply_pairs(arguments: Any, step: Any, task: Any) -> None:
    """Words: number of tasks and of panels, x, its step, number of rows and of pairs, panels, bias, y, its step."""
    words = words_at(arguments)
    panels = carray(pointer_at(words[6]), (_UNLIMITED,), np.uint16)
    for panel in range(words[1] * task // words[0], words[1] * (task + 1) // words[0]):
        avx512_bf16.multiply_panel(panel, words[2], words[3], words[4], words[5], panels, words[7], words[8], words[9])


@Operation
def _multiply_tiles(arguments: Any, step: Any, task: Any) -> None:
    """Words: number of tasks and of panels, x, its step, number of rows and of steps, panels, bias, y, its step."""
    words = words_at(arguments)
    begin, end = words[1] * task // words[0], words[1] * (task + 1) // words[0]
    panels = carray(pointer_at(words[6]), (_UNLIMITED,), np.uint16)
    amx.multiply_share(begin, end, words[2], words[3], words[4], words[5], panels, words[7], words[8], words[9])


def _record_pairs(tape: Tape, product: AmxPanels | Avx512Bf16Panels, x: torch.Tensor) -> torch.Tensor:
    multiply, together, pad = _multiply_pairs, 2, 0
    if isinstance(product, AmxPanels):
        multiply, together, pad = _multiply_tiles, amx.TILE_INPUTS, avx512_bf16.ROW_PAD
    in_features, size = x.shape[1], x.shape[1] + -x.shape[1] % together
    rounded = tape.scratch(2 * (size + avx512_bf16.ROW_PAD))
    rounded_step = _step_of(rounded, tape.num_rows)
    y = tape.rows(product.num_panels * OUTPUTS + pad)
    address, stride = rows_of(x)
    tape.for_each_row(_round_pairs, (address, 4 * stride, in_features, rounded.data_ptr(), rounded_step, size))
    num_tasks = tape.num_tasks(product.num_panels)
    tape.in_tasks(multiply, num_tasks, (
        num_tasks, product.num_panels, rounded.data_ptr(), rounded_step, tape.num_rows, size // together,
        product.panels.ctypes.data, product.bias.data_ptr(), y.data_ptr(), 4 * y.stride(0),
    ))  # fmt: skip
    tape.own(product)
    return y[:, : product.out_features]


def _multiply_floats(element: Any) -> Operation:
    """Words: number of tasks and of panels, x, its step, number of rows and of inputs, panels, bias, y, its step."""

    def multiply(arguments: Any, step: Any, task: Any) -> None:
        words = words_at(arguments)
        panels = carray(pointer_at(words[6]), (_UNLIMITED,), element)
        for panel in range(words[1] * task // words[0], words[1] * (task + 1) // words[0]):
            float_panels.multiply_panel(
                panel, words[2], words[3], words[4], words[5], panels, words[7], words[8], words[9]
            )

    return Operation(multiply)


_MULTIPLY_FLOATS = {2: _multiply_floats(np.uint16), 4: _multiply_floats(np.float32)}


def _record_floats(tape: Tape, product: FloatPanels, x: torch.Tensor) -> torch.Tensor:
    num_panels = -(-product.out_features // PANEL)
    y = tape.rows(num_panels * PANEL)
    address, stride = rows_of(x)
    num_tasks = tape.num_tasks(num_panels)
    bias = 0 if product.bias is None else product.bias.data_ptr()
    tape.in_tasks(_MULTIPLY_FLOATS[product.panels.itemsize], num_tasks, (
        num_tasks, num_panels, address, 4 * stride, tape.num_rows, x.shape[1], product.panels.ctypes.data, bias,
        y.data_ptr(), 4 * y.stride(0),
    ))  # fmt: skip
    tape.own(product)
    return y[:, : product.out_features]


@cache
def _round_codes(kind_name: str) -> Operation:
    """Words: x, its step, number of inputs, rows of whole blocks, their step, number of blocks, size of a block,
    integers, their step, factors, their step. Double: limit.

    Rows of `x` that do not fill their last block are copied first, and padded with 0.
    """
    kind: Any = np.dtype(kind_name).type

    def round_codes(arguments: Any, step: Any, task: Any) -> None:
        words, doubles = words_at(arguments), doubles_at(arguments)
        x, whole = words[0] + task * words[1], words[3] + task * words[4]
        if words[3] == 0:
            whole = x
        else:
            row, copy = floats_at(x), floats_at(whole)
            for i in range(words[2]):
                copy[i] = row[i]
        round_row(
            whole, words[5], words[6], np.float32(doubles[11]), words[7] + task * words[8], kind,
            words[9] + task * words[10],
        )  # fmt: skip

    return Operation(round_codes)


@cache
def _multiply_codes(kind_name: str, entry_name: str | None) -> Operation:
    """Words: number of tasks and of panels, integers, their step, factors, their step, number of rows, panels, number
    of groups, size of a group and of a block, bytes of a scale and of a minimum, table, bias, y, its step.

    The arguments are the dtypes of the integers and of the table, or None without a table.
    """
    # `multiply_panel` takes an array of the dtype, as in the kernel, so that it is compiled only once.
    kind: Any = np.dtype(kind_name).type
    itemsize = np.dtype(kind_name).itemsize
    if entry_name is None:

        def multiply(arguments: Any, step: Any, task: Any) -> None:
            words = words_at(arguments)
            panels = carray(pointer_at(words[7]), (_UNLIMITED,), np.uint8)
            x = carray(pointer_at(words[2]), (words[6], words[3] // itemsize), kind)
            for panel in range(words[1] * task // words[0], words[1] * (task + 1) // words[0]):
                quantized_linear.multiply_panel(
                    panel, words[2], words[3], x, words[4], words[5], words[6], panels, words[8], words[9],
                    words[10], words[11], words[12], None, words[14], words[15], words[16],
                )  # fmt: skip

        return Operation(multiply)

    entry: Any = np.dtype(entry_name).type

    def multiply_by_table(arguments: Any, step: Any, task: Any) -> None:
        words = words_at(arguments)
        panels = carray(pointer_at(words[7]), (_UNLIMITED,), np.uint8)
        x = carray(pointer_at(words[2]), (words[6], words[3] // itemsize), kind)
        table = carray(pointer_at(words[13]), (16,), entry)
        for panel in range(words[1] * task // words[0], words[1] * (task + 1) // words[0]):
            quantized_linear.multiply_panel(
                panel, words[2], words[3], x, words[4], words[5], words[6], panels, words[8], words[9],
                words[10], words[11], words[12], table, words[14], words[15], words[16],
            )  # fmt: skip

    return Operation(multiply_by_table)


@Operation
def _split_integers(arguments: Any, step: Any, task: Any) -> None:
    """Words: integers, their step, number of inputs, halves of the integers, their step. The lower halves of a row
    follow its upper halves.
    """
    words = words_at(arguments)
    upper = words[3] + task * words[4]
    quantized_amx.split(words[0] + task * words[1], words[2], upper, upper + words[2])


@cache
def _multiply_code_tiles(entry_name: str | None) -> Operation:
    """The words of `_multiply_codes`, with the halves of the integers instead of the integers."""
    if entry_name is None:

        def multiply(arguments: Any, step: Any, task: Any) -> None:
            words = words_at(arguments)
            panels = carray(pointer_at(words[7]), (_UNLIMITED,), np.uint8)
            quantized_amx.multiply_share(
                words[1] * task // words[0], words[1] * (task + 1) // words[0], words[2], words[3],
                words[8] * words[9], words[4], words[5], words[6], panels, words[8], words[9], words[10], words[11],
                words[12], None, words[14], words[15], words[16],
            )  # fmt: skip

        return Operation(multiply)

    entry: Any = np.dtype(entry_name).type

    def multiply_by_table(arguments: Any, step: Any, task: Any) -> None:
        words = words_at(arguments)
        panels = carray(pointer_at(words[7]), (_UNLIMITED,), np.uint8)
        table = carray(pointer_at(words[13]), (16,), entry)
        quantized_amx.multiply_share(
            words[1] * task // words[0], words[1] * (task + 1) // words[0], words[2], words[3],
            words[8] * words[9], words[4], words[5], words[6], panels, words[8], words[9], words[10], words[11],
            words[12], table, words[14], words[15], words[16],
        )  # fmt: skip

    return Operation(multiply_by_table)


def _record_codes(
    tape: Tape, linear: QuantizedLinear, x: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`out` has room for whole panels. None means new rows."""
    packed, num_rows, in_features = linear.packed, tape.num_rows, x.shape[1]
    uses_tiles = linear.uses_tiles(num_rows)
    kind_type, limit = linear.rounding(uses_tiles)
    kind = np.dtype(kind_type).name
    size, num_blocks = packed.num_groups * packed.group, packed.num_groups * packed.group // packed.block
    rounded = tape.scratch((size + quantized_linear.ROW_PAD) * np.dtype(kind).itemsize)
    factors = tape.scratch(8 * num_blocks)
    # The padding of new memory is 0, and no program writes to it.
    whole = tape.new_rows(size) if in_features < size else None
    pad = quantized_linear.ROW_PAD if uses_tiles else 0
    y = tape.rows(packed.num_panels * OUTPUTS + pad) if out is None else out
    address, stride = rows_of(x)
    whole_rows = (0, 0) if whole is None else (whole.data_ptr(), 4 * whole.stride(0))
    rounded_rows = rounded.data_ptr(), _step_of(rounded, num_rows)
    factor_rows = factors.data_ptr(), _step_of(factors, num_rows)
    tape.for_each_row(
        _round_codes(kind),
        (address, 4 * stride, in_features, *whole_rows, num_blocks, packed.block, *rounded_rows, *factor_rows),
        (float(limit),),
    )
    num_tasks = tape.num_tasks(packed.num_panels)
    table = packed.table
    entry = None if table is None else table.dtype.name
    multiply, integers = _multiply_codes(kind, entry), rounded_rows
    if uses_tiles:
        halves = tape.scratch(2 * size + quantized_linear.ROW_PAD)
        multiply, integers = _multiply_code_tiles(entry), (halves.data_ptr(), _step_of(halves, num_rows))
        tape.for_each_row(_split_integers, (*rounded_rows, size, *integers))
    tape.in_tasks(multiply, num_tasks, (
        num_tasks, packed.num_panels, *integers, *factor_rows, num_rows, packed.panels.ctypes.data,
        packed.num_groups, packed.group, packed.block, packed.scale_bytes, packed.minimum_bytes,
        0 if table is None else table.ctypes.data, linear.bias.data_ptr(), y.data_ptr(), 4 * y.stride(0),
    ))  # fmt: skip
    tape.own(linear, whole)
    return y[:, : linear.out_features]


def _step_of(memory: torch.Tensor, num_rows: int) -> int:
    return memory.numel() // num_rows
