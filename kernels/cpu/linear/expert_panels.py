"""Products with the weights of experts, in one parallel loop over the panels of all chosen experts.

A parallel loop for each expert would wait for its slowest thread, thousands of times in a decode step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import prange
from torch.nn import functional

from loramux.kernels.cpu.instructions import avx512_bf16
from loramux.kernels.cpu.instructions.arrays import array, rows_of
from loramux.kernels.cpu.instructions.compiled import helper, kernel
from loramux.kernels.cpu.instructions.vectors import PANEL, floats_at
from loramux.kernels.cpu.linear import linear
from loramux.kernels.routing import Routing

ROWS_TO_SPREAD = 8
"""Mean number of rows per expert above which threads share the panels of each expert, so that their work is equal. With
fewer rows, reading weights takes most of the time, and each thread reads consecutive panels.
"""


class ExpertPanels:
    """One linear layer of each expert in the layout of `Avx512Bf16Panels` or of `FloatPanels`.

    A row's result is bitwise independent of the other rows.
    """

    def __init__(self, weights: Iterable[torch.Tensor], bias: torch.Tensor | None, *, has_pairs: bool) -> None:
        """`has_pairs` selects the layout of `Avx512Bf16Panels`, for bfloat16 weights `[out_features, in_features]`."""
        self._has_pairs = has_pairs
        experts = []
        for weight in weights:
            self._out_features, self._in_features = weight.shape
            experts.append(avx512_bf16.pair_panels_of(weight, 2).view(-1) if has_pairs else linear.float_panels(weight))
        width = avx512_bf16.OUTPUTS if has_pairs else PANEL
        self._num_panels = -(-self._out_features // width)
        stacked = torch.cat(experts)
        self._panels = array(stacked, stacked.dtype)
        missing = (0, self._num_panels * width - self._out_features)
        self._bias = torch.zeros(len(experts), self._num_panels * width)
        if bias is not None:
            self._bias[:] = functional.pad(bias.float(), missing)

    def multiply(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """Compute `reference.experts.multiply_experts`."""
        starts = routing.starts.numpy()
        chosen = np.flatnonzero(np.diff(starts))
        num_pairs, width = routing.num_pairs, self._bias.shape[1]
        sums = torch.empty(num_pairs, width + avx512_bf16.ROW_PAD)
        y = torch.empty(num_pairs, self._out_features)
        if self._has_pairs:
            size = self._in_features + self._in_features % 2 + avx512_bf16.ROW_PAD
            rows = torch.empty(num_pairs, size, dtype=torch.bfloat16)
            multiply = multiply_pair_panels
        else:
            rows = torch.empty(num_pairs, self._in_features)
            multiply = multiply_float_panels
        multiply(
            *rows_of(x), routing.pairs_per_row(x), self._in_features, routing.pairs.numpy(), starts, chosen,
            rows.data_ptr(), rows.shape[1], self._panels, self._num_panels, self._bias.data_ptr(), *rows_of(sums),
            y.data_ptr(), self._out_features,
        )  # fmt: skip
        return y


@helper
def _gather_row(x_address: int, out_address: int, size: int) -> None:
    x, out = floats_at(x_address), floats_at(out_address)
    for i in range(size):
        out[i] = x[i]


@helper
def place_task(task: int, num_panels: int, chosen: Any, is_spread: bool) -> tuple[int, int]:
    """The expert of a task, and the panel of that expert."""
    if is_spread:
        return chosen[task % len(chosen)], task // len(chosen)
    return chosen[task // num_panels], task % num_panels


@helper
def scatter(
    pairs: Any, begin: int, end: int, sums: int, sums_step: int, y: int, y_step: int, first: int, size: int
) -> None:
    """Copy `size` outputs of each of the sorted pairs `[begin, end)` to the row of `y` that belongs to the pair."""
    for i in range(begin, end):
        _gather_row(sums + i * sums_step + 4 * first, y + pairs[i] * y_step + 4 * first, size)


@kernel
def multiply_pair_panels(
    x: int,
    x_stride: int,
    pairs_per_row: int,
    in_features: int,
    pairs: npt.NDArray[np.int32],
    starts: npt.NDArray[np.int32],
    chosen: npt.NDArray[np.int64],
    rows: int,
    rows_stride: int,
    panels: npt.NDArray[np.uint16],
    num_panels: int,
    bias: int,
    sums: int,
    sums_stride: int,
    y: int,
    out_features: int,
) -> None:
    """`y[pair] = bfloat16(x[pair // pairs_per_row]) @ weight[expert of pair]ᵀ + bias[expert]`.

    `pairs`, sorted by expert, and `starts` come from a `Routing`. `chosen` lists the experts that have pairs. `rows`
    and `sums` are scratch with one row per pair, in the formats of `rounded` and `y` in
    `avx512_bf16.multiply_pair_panels`.
    """
    width = avx512_bf16.OUTPUTS
    num_words = (in_features + 1) // 2
    rows_step, sums_step = 2 * rows_stride, 4 * sums_stride
    for i in prange(len(pairs)):
        x_row = x + 4 * x_stride * (pairs[i] // pairs_per_row)
        avx512_bf16.round_row(x_row, in_features, rows + i * rows_step, 2 * num_words)
    is_spread = len(pairs) > ROWS_TO_SPREAD * len(chosen)
    for task in prange(len(chosen) * num_panels):
        expert, panel = place_task(task, num_panels, chosen, is_spread)
        begin, end = starts[expert], starts[expert + 1]
        # The panels of all experts are consecutive, but each expert's sums begin at the first column.
        shift = expert * num_panels
        avx512_bf16.multiply_panel(
            shift + panel, rows + begin * rows_step, rows_step, end - begin, num_words, panels, bias,
            sums + begin * sums_step - 4 * width * shift, sums_step,
        )  # fmt: skip
        first = panel * width
        scatter(pairs, begin, end, sums, sums_step, y, 4 * out_features, first, min(width, out_features - first))


@kernel
def multiply_float_panels(
    x: int,
    x_stride: int,
    pairs_per_row: int,
    in_features: int,
    pairs: npt.NDArray[np.int32],
    starts: npt.NDArray[np.int32],
    chosen: npt.NDArray[np.int64],
    rows: int,
    rows_stride: int,
    panels: npt.NDArray[np.float32] | npt.NDArray[np.uint16],
    num_panels: int,
    bias: int,
    sums: int,
    sums_stride: int,
    y: int,
    out_features: int,
) -> None:
    """Like `multiply_pair_panels`, but for the layout of `FloatPanels`, without rounding `x`."""
    rows_step, sums_step = 4 * rows_stride, 4 * sums_stride
    for i in prange(len(pairs)):
        _gather_row(x + 4 * x_stride * (pairs[i] // pairs_per_row), rows + i * rows_step, in_features)
    is_spread = len(pairs) > ROWS_TO_SPREAD * len(chosen)
    for task in prange(len(chosen) * num_panels):
        expert, panel = place_task(task, num_panels, chosen, is_spread)
        begin, end = starts[expert], starts[expert + 1]
        shift = expert * num_panels
        linear.multiply_panel(
            shift + panel, rows + begin * rows_step, rows_step, end - begin, in_features, panels, bias,
            sums + begin * sums_step - 4 * PANEL * shift, sums_step,
        )  # fmt: skip
        first = panel * PANEL
        scatter(pairs, begin, end, sums, sums_step, y, 4 * out_features, first, min(PANEL, out_features - first))
