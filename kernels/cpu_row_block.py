"""The innermost loop of the CPU's linear layer, as LLVM code: a block of rows times one panel of a weight.

Up to `MAX_ROWS` rows times the 16 outputs of a panel are sums that stay in registers while `k` runs, so that each
weight that is loaded and widened is used by every row of the block (Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication", 2008).
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types  # type: ignore[attr-defined]
from numba.np.arrayobj import make_array

from loramux.kernels.compiled import intrinsic

PANEL = 16
"""Outputs of a panel: two AVX2 registers or one of AVX-512 for each row."""

MAX_ROWS = 6
"""Rows of a block: with AVX2, 12 of the 16 registers are sums, and 3 hold weights and an input."""

_FLOAT = ir.FloatType()
_HALF = ir.IntType(16)
_INT = ir.IntType(32)
_LONG = ir.IntType(64)
_LANES = ir.VectorType(_FLOAT, PANEL)
_CONTRACT = ("contract",)


@intrinsic(prefer_literal=True)
def add_row_block(
    typing_context: Any, rows: Any, x: Any, x_step: Any, weights: Any, first: Any, size: Any, y: Any, y_step: Any
) -> Any:
    """`y[r, o] += sum over k of x[r, k] * weights[first + 16 k + o]`, of `size` >= 1 elements `k`, one after another.

    `rows` is a literal in `[1, MAX_ROWS]`; `x` and `y` are the addresses of float32 rows that are `x_step` and
    `y_step` bytes apart; `weights` is a flat array of float32, or of the uint16 bits of bfloat16. Bounds are not
    checked. The sum of an output has one order whatever `rows` is, so its bits do not depend on the neighbours.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, x, x_step, array, first, size, y, y_step = args
        panel = builder.gep(make_array(weights)(context, builder, array).data, [first])
        x_rows = [_row(builder, x, x_step, r, _FLOAT) for r in range(num_rows)]
        y_rows = [_row(builder, y, y_step, r, _LANES) for r in range(num_rows)]
        before = [builder.load(row, align=4) for row in y_rows]

        entry = builder.block
        loop, done = builder.append_basic_block("row_block"), builder.append_basic_block("row_block_done")
        builder.branch(loop)
        builder.position_at_end(loop)
        k = builder.phi(_LONG)
        sums = [builder.phi(_LANES) for _ in range(num_rows)]
        lanes = _load_lanes(builder, panel, builder.mul(k, _LONG(PANEL)), is_float)
        after = [
            _multiply_add(builder, builder.load(builder.gep(row, [k])), lanes, partial)
            for row, partial in zip(x_rows, sums, strict=True)
        ]
        next_k = builder.add(k, _LONG(1))
        k.add_incoming(_LONG(0), entry)
        k.add_incoming(next_k, loop)
        for partial, value, total in zip(sums, before, after, strict=True):
            partial.add_incoming(value, entry)
            partial.add_incoming(total, loop)
        builder.cbranch(builder.icmp_signed("<", next_k, size), loop, done)

        builder.position_at_end(done)
        for row, total in zip(y_rows, after, strict=True):
            builder.store(total, row, align=4)
        return context.get_dummy_value()

    num_rows = rows.literal_value
    is_float = weights.dtype == types.float32
    integers = [types.int64] * 4
    return types.none(rows, *integers[:2], weights, *integers), generate


def _row(builder: Any, address: Any, step: Any, row: int, element: Any) -> Any:
    return builder.inttoptr(builder.add(address, builder.mul(step, _LONG(row))), element.as_pointer())


def _load_lanes(builder: Any, panel: Any, index: Any, is_float: bool) -> Any:
    source = builder.gep(panel, [index])
    if is_float:
        return builder.load(builder.bitcast(source, _LANES.as_pointer()), align=4)
    halves = ir.VectorType(_HALF, PANEL)
    wide = builder.zext(builder.load(builder.bitcast(source, halves.as_pointer()), align=2), ir.VectorType(_INT, PANEL))
    return builder.bitcast(builder.shl(wide, ir.Constant(wide.type, [16] * PANEL)), _LANES)


def _multiply_add(builder: Any, scalar: Any, lanes: Any, total: Any) -> Any:
    first = builder.insert_element(ir.Constant(_LANES, ir.Undefined), scalar, _INT(0))
    everywhere = builder.shuffle_vector(first, first, ir.Constant(ir.VectorType(_INT, PANEL), [0] * PANEL))
    return builder.fadd(builder.fmul(everywhere, lanes, flags=_CONTRACT), total, flags=_CONTRACT)
