"""Products with a quantised weight on a CPU, without dequantising the weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import prange
from torch.nn import functional

from loramux.kernels.cpu.instructions.amx import TILE
from loramux.kernels.cpu.instructions.arrays import rows_of
from loramux.kernels.cpu.instructions.blocks import begin_outputs
from loramux.kernels.cpu.instructions.compiled import helper, kernel
from loramux.kernels.cpu.instructions.integer_blocks import (
    HAS_VNNI,
    IS_SUPPORTED,
    MAX_ROWS,
    OUTPUTS,
    add_codes,
)
from loramux.kernels.cpu.instructions.rounded_rows import bytes_of, round_blocks
from loramux.kernels.cpu.linear.quantized_amx import has_integer_tiles, multiply_code_tiles
from loramux.kernels.cpu.linear.quantized_layout import CodePanels, pack_codes
from loramux.kernels.cpu.linear.unpacked_codes import add_unpacked, unpacks_once
from loramux.kernels.quantized import QuantizedWeight

ROW_PAD = 32
"""Padding elements between rows of the rounded `x`, and between rows of `y` if there are many or if tiles are used.
Without padding, rows whose length is a power of two would all map to one cache set."""

MANY_ROWS = 64

SERIAL_WORK = 500_000
"""Number of multiplications below which waking other threads costs more than it saves."""

ROWS_WITHOUT_TILES = {16: MAX_ROWS, 8: 40}
"""Maximum number of rows for which tiles of AMX are not used, by the number of bits of `x`. Tiles multiply two bytes of
each input. They are faster from 13 rows of 16 bits on. With 8 bits, they are faster only for weights of 8 bits, from
about 48 rows on, and are not used for weights of 4 bits.
"""

LARGEST_BYTE = np.float32(127)
"""Largest magnitude of the integers to which an 8-bit `x` is rounded."""


def pack_if_supported(weight: QuantizedWeight) -> CodePanels | None:
    """Lay out a weight, or return None if this CPU cannot multiply by its codes."""
    return pack_codes(weight) if IS_SUPPORTED else None


def takes_bytes(packed: CodePanels) -> bool:
    """True if this CPU can multiply a weight by an `x` of 8 bits.

    This requires integers that fit into 8 bits and VNNI, or plain codes.
    """
    return packed.has_plain_codes or (HAS_VNNI and packed.fits_tiles)


def make_quantized_linear(
    weight: QuantizedWeight, bias: torch.Tensor | None, x_bits: int = 16
) -> QuantizedLinear | None:
    """The linear layer of a quantised weight, or None if this CPU cannot multiply by its codes.

    `x_bits` 8 has no effect if this CPU can multiply the weight only by an `x` of 16 bits.
    """
    packed = pack_if_supported(weight)
    if packed is None:
        return None
    return QuantizedLinear(packed, weight.out_features, bias, x_bits if takes_bytes(packed) else 16)


class QuantizedLinear:
    """`y = x @ weightᵀ + bias` for a quantised weight `[out_features, in_features]`, laid out by `pack_codes`.

    `x` is rounded to 16 or 8 bits, relative to the largest input of each block. A row's result is bitwise independent
    of the other rows, and the same on every x86 CPU.
    """

    def __init__(self, packed: CodePanels, out_features: int, bias: torch.Tensor | None, x_bits: int) -> None:
        self.packed = packed
        self.x_bits = x_bits
        self.out_features = out_features
        self.bias = torch.zeros(packed.num_panels * OUTPUTS)
        if bias is not None:
            self.bias[:out_features] = bias.detach()

    def uses_tiles(self, num_rows: int) -> bool:
        """True if products of this many rows are computed with AMX."""
        packed = self.packed
        if num_rows <= ROWS_WITHOUT_TILES[self.x_bits] or (self.x_bits == 8 and packed.table is not None):
            return False
        return packed.fits_tiles and has_integer_tiles()

    def rounding(self, uses_tiles: bool) -> tuple[type[np.signedinteger[Any]], np.float32]:
        """The dtype of the integers to which `x` is rounded, and their largest magnitude."""
        if self.x_bits == 16:
            return np.int16, np.float32(self.packed.limit)
        # Tiles read `x` as int16. The integers are the same.
        return np.int16 if uses_tiles else np.int8, LARGEST_BYTE

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        packed = self.packed
        num_rows, size = x.shape[0], packed.num_groups * packed.group
        if x.shape[1] < size:
            x = functional.pad(x, (0, size - x.shape[1]))
        uses_tiles = self.uses_tiles(num_rows)
        kind, limit = self.rounding(uses_tiles)
        rounded = np.empty((num_rows, size + ROW_PAD), kind)
        factors = torch.empty(num_rows, size // packed.block, 2)
        y = torch.empty(num_rows, len(self.bias) + (ROW_PAD if uses_tiles or num_rows >= MANY_ROWS else 0))
        inputs = (*rows_of(x), num_rows, limit, rounded.ctypes.data, rounded.shape[1])
        weight = (
            packed.panels, packed.num_panels, packed.num_groups, packed.group, packed.block, packed.scale_bytes,
            packed.minimum_bytes, packed.table, self.bias.data_ptr(),
        )  # fmt: skip
        if uses_tiles:
            num_threads = torch.get_num_threads()
            halves = torch.empty(2, num_rows + -num_rows % TILE, size + ROW_PAD, dtype=torch.uint8)
            multiply_code_tiles(
                num_threads, *inputs, halves.data_ptr(), halves.stride(1), halves.stride(0), factors.data_ptr(),
                *weight, *rows_of(y),
            )  # fmt: skip
        else:
            multiply_codes(*inputs, rounded, factors.data_ptr(), *weight, *rows_of(y))
        return y[:, : self.out_features]


@helper
def multiply_panel(
    panel: int, x: int, x_step: int, kind: Any, factors: int, factor_step: int, num_rows: int, panels: Any,
    num_groups: int, group: int, block: int, scale_bytes: int, minimum_bytes: int, table: Any, bias: int, y: int,
    y_step: int,
) -> None:  # fmt: skip
    """Compute the 32 outputs of one panel for all rows."""
    y_panel = y + 4 * OUTPUTS * panel
    begin_outputs(y_panel, y_step, num_rows, OUTPUTS, bias + 4 * OUTPUTS * panel)
    input_bytes = OUTPUTS if table is None else OUTPUTS // 2
    head_bytes = (scale_bytes + minimum_bytes) * OUTPUTS
    if table is not None and unpacks_once(num_rows, kind):
        add_unpacked(
            panel * num_groups * (head_bytes + group * input_bytes), x, x_step, kind, factors, factor_step,
            num_rows, panels, num_groups, group, block, scale_bytes, minimum_bytes, table, y_panel, y_step,
        )  # fmt: skip
        return
    num_row_blocks = (num_rows + MAX_ROWS - 1) // MAX_ROWS
    for g in range(num_groups):
        head = (panel * num_groups + g) * (head_bytes + group * input_bytes)
        for k in range(g * group, (g + 1) * group, block):
            codes = head + head_bytes + (k - g * group) * input_bytes
            for part in range(num_row_blocks):
                # Make blocks nearly equal in size, because a small block would unpack each code for only a few rows.
                begin, end = num_rows * part // num_row_blocks, num_rows * (part + 1) // num_row_blocks
                add_codes(
                    end - begin, x + begin * x_step + bytes_of(kind) * k, x_step, kind,
                    factors + begin * factor_step + 8 * (k // block), factor_step, panels, head, scale_bytes,
                    minimum_bytes, codes, table, block // 2, y_panel + begin * y_step, y_step,
                )  # fmt: skip


@kernel
def multiply_codes(
    x: int,
    x_stride: int,
    num_rows: int,
    limit: Any,
    rounded: int,
    rounded_stride: int,
    kind: Any,
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
    """`y[t] = x[t] @ weightᵀ + bias`. `x`, `rounded`, `factors`, `bias` and `y` are addresses.

    `CodePanels` describes the weight. `x` and `y` have float32 rows, `x_stride` and `y_stride` elements apart. Rows of
    `x` cover whole blocks. `bias` and rows of `y` cover whole panels. `rounded` is scratch for `num_rows` rows of the
    dtype of `kind` (np.int16 or np.int8), `rounded_stride` elements apart. `kind` is an array, because numba finds the
    type of an array much faster than the type of a dtype. `factors` is scratch for `num_rows` rows of two 32-bit words
    per block.
    """
    num_blocks = num_groups * group // block
    x_step, factor_step, y_step = bytes_of(kind) * rounded_stride, 8 * num_blocks, 4 * y_stride
    round_blocks(x, 4 * x_stride, num_rows, num_blocks, block, limit, rounded, x_step, kind, factors, factor_step)
    if num_rows * num_blocks * block * num_panels * OUTPUTS < SERIAL_WORK:
        for panel in range(num_panels):
            multiply_panel(
                panel, rounded, x_step, kind, factors, factor_step, num_rows, panels, num_groups, group, block,
                scale_bytes, minimum_bytes, table, bias, y, y_step,
            )  # fmt: skip
    else:
        for panel in prange(num_panels):
            multiply_panel(
                np.int64(panel), rounded, x_step, kind, factors, factor_step, num_rows, panels, num_groups, group,
                block, scale_bytes, minimum_bytes, table, bias, y, y_step,
            )  # fmt: skip
