"""Products with the 8-bit and 4-bit weights of experts, in one parallel loop over the panels of all chosen experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import prange
from torch.nn import functional

from loramux.kernels.cpu.instructions.arrays import rows_of
from loramux.kernels.cpu.instructions.compiled import kernel
from loramux.kernels.cpu.instructions.integer_blocks import OUTPUTS
from loramux.kernels.cpu.instructions.rounded_rows import bytes_of, round_row
from loramux.kernels.cpu.linear.expert_panels import ROWS_TO_SPREAD, place_task, scatter
from loramux.kernels.cpu.linear.quantized_layout import CodePanels, widened
from loramux.kernels.cpu.linear.quantized_linear import (
    LARGEST_BYTE,
    ROW_PAD,
    multiply_panel,
    pack_if_supported,
    takes_bytes,
)
from loramux.kernels.quantized import QuantizedWeight
from loramux.kernels.routing import Routing


def make_coded_experts(
    num_experts: int, weights: Iterable[QuantizedWeight | torch.Tensor], bias: torch.Tensor | None, x_bits: int = 16
) -> CodedExperts | None:
    """Lay out one weight for each expert, or return None if this CPU cannot multiply by the codes of every weight.

    None is also returned if the panels of the weights differ in layout, table or limit. Scales and minima of all
    experts become as wide as the widest. `x_bits` is as in `make_quantized_linear`.
    """
    first: CodePanels | None = None
    panels = np.empty((0, 0), np.uint8)
    out_features = 0
    for expert, weight in enumerate(weights):
        packed = pack_if_supported(weight) if isinstance(weight, QuantizedWeight) else None
        if packed is None:
            return None
        if first is None:
            first, out_features = replace(packed, panels=panels.reshape(-1)), weight.shape[0]
            # Stacking the panels at the end would hold every expert in memory twice.
            panels = np.empty((num_experts, packed.panels.size), np.uint8)
        if _traits(packed) != _traits(first):
            return None
        sizes = max(packed.scale_bytes, first.scale_bytes), max(packed.minimum_bytes, first.minimum_bytes)
        if sizes != (first.scale_bytes, first.minimum_bytes):
            # float16 represents the scales of the experts so far, but not this expert's.
            panels = _wider_stack(panels, expert, first, sizes)
            first = replace(first, scale_bytes=sizes[0], minimum_bytes=sizes[1])
        panels[expert] = widened(packed, *sizes).panels
    assert first is not None
    packed = replace(first, panels=panels.reshape(-1))
    return CodedExperts(packed, num_experts, out_features, bias, x_bits if takes_bytes(packed) else 16)


def _wider_stack(
    panels: npt.NDArray[np.uint8], count: int, packed: CodePanels, sizes: tuple[int, int]
) -> npt.NDArray[np.uint8]:
    """The stack with wider scales and minima. Its first `count` experts are filled, and `packed` describes them."""
    filled = widened(replace(packed, panels=panels[:count].reshape(-1)), *sizes).panels.reshape(count, -1)
    wider = np.empty((len(panels), filled.shape[1]), np.uint8)
    wider[:count] = filled
    return wider


def _traits(packed: CodePanels) -> tuple[Any, ...]:
    table = None if packed.table is None else packed.table.tobytes()
    return packed.num_panels, packed.num_groups, packed.group, packed.block, packed.limit, table


class CodedExperts:
    """One linear layer of each expert, with quantised weights.

    `x` is rounded as in `QuantizedLinear`. A row's result is bitwise independent of the other rows, and the same on
    every x86 CPU.
    """

    def __init__(
        self, packed: CodePanels, num_experts: int, out_features: int, bias: torch.Tensor | None, x_bits: int
    ) -> None:
        """`packed.panels` contains the panels of all experts in order. The other fields describe one expert."""
        self.x_bits = x_bits
        self._packed = packed
        self._kind: type[np.signedinteger[Any]] = np.int8 if x_bits == 8 else np.int16
        self._limit = LARGEST_BYTE if x_bits == 8 else np.float32(packed.limit)
        self._out_features = out_features
        self._bias = torch.zeros(num_experts, packed.num_panels * OUTPUTS)
        if bias is not None:
            self._bias[:, :out_features] = bias

    def multiply(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Compute `reference.experts.multiply_experts`."""
        packed = self._packed
        starts = routing.starts.numpy()
        size = packed.num_groups * packed.group
        if x.shape[1] < size:
            x = functional.pad(x, (0, size - x.shape[1]))
        num_pairs = routing.num_pairs
        rounded = np.empty((num_pairs, size + ROW_PAD), self._kind)
        factors = torch.empty(num_pairs, size // packed.block, 2)
        sums = torch.empty(num_pairs, self._bias.shape[1] + ROW_PAD)
        y = torch.empty(num_pairs, self._out_features)
        multiply_expert_codes(
            *rows_of(x), routing.pairs_per_row(x), routing.pairs.numpy(), starts, np.flatnonzero(np.diff(starts)),
            self._limit, rounded.ctypes.data, rounded.shape[1], rounded, factors.data_ptr(), packed.panels,
            packed.num_panels, packed.num_groups, packed.group, packed.block, packed.scale_bytes, packed.minimum_bytes,
            packed.table, self._bias.data_ptr(), *rows_of(sums), y.data_ptr(), self._out_features,
        )  # fmt: skip
        return y


@kernel
def multiply_expert_codes(
    x: int,
    x_stride: int,
    pairs_per_row: int,
    pairs: npt.NDArray[np.int32],
    starts: npt.NDArray[np.int32],
    chosen: npt.NDArray[np.int64],
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
    sums: int,
    sums_stride: int,
    y: int,
    out_features: int,
) -> None:
    """`y[pair] = x[pair // pairs_per_row] @ weight[expert of pair]ᵀ + bias[expert]`.

    `pairs`, sorted by expert, and `starts` come from a `Routing`. `chosen` lists the experts that have pairs.
    `rounded`, `factors` and `sums` are scratch with one row per pair, in the formats of `rounded`, `factors` and `y` in
    `quantized_linear.multiply_codes`.
    """
    num_blocks = num_groups * group // block
    x_step, factor_step, sums_step = bytes_of(kind) * rounded_stride, 8 * num_blocks, 4 * sums_stride
    for i in prange(len(pairs)):
        x_row = x + 4 * x_stride * (pairs[i] // pairs_per_row)
        round_row(x_row, num_blocks, block, limit, rounded + i * x_step, kind, factors + i * factor_step)
    is_spread = len(pairs) > ROWS_TO_SPREAD * len(chosen)
    for task in prange(len(chosen) * num_panels):
        expert, panel = place_task(task, num_panels, chosen, is_spread)
        begin, end = starts[expert], starts[expert + 1]
        # The panels of all experts are consecutive, but each expert's sums begin at the first column.
        shift = expert * num_panels
        multiply_panel(
            shift + panel, rounded + begin * x_step, x_step, kind, factors + begin * factor_step, factor_step,
            end - begin, panels, num_groups, group, block, scale_bytes, minimum_bytes, table, bias,
            sums + begin * sums_step - 4 * OUTPUTS * shift, sums_step,
        )  # fmt: skip
        first = panel * OUTPUTS
        scatter(pairs, begin, end, sums, sums_step, y, 4 * out_features, first, min(OUTPUTS, out_features - first))
