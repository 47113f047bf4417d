"""A linear layer whose weight is laid out for the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import prange
from torch.nn import functional

from loramux.kernels.compiled import helper, kernel
from loramux.kernels.cpu_arrays import array, rows_of
from loramux.kernels.cpu_blocks import PANEL, add_panel
from loramux.kernels.cpu_vectors import floats_at

BLOCK_INPUTS = 256
"""Inputs of a panel that all rows are multiplied with while they are in the first cache: 8 KiB of bfloat16."""

SERIAL_WORK = 200_000
"""Multiplications below which waking the other threads costs more than it saves."""

ROWS_HINT = 16
"""The number of rows that oneDNN chooses its layout for: a full decode batch, the most frequent step."""


class PackedLinear:
    """`y = x @ weightᵀ + bias` for float32 `x` `[T, in_features]`, a view with contiguous rows.

    The weight `[out_features, in_features]` is kept once: as oneDNN's blocked bfloat16 where it is bfloat16 and this
    CPU multiplies that, which rounds `x` and `y` to it; else in panels of 16 outputs, bfloat16 as it is and every other
    dtype as float32, whose products are summed in float32. There the bits of a row do not depend on the other rows.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._blocked: torch.Tensor | None = None
        weight = weight.detach()
        if weight.dtype == torch.bfloat16 and multiplies_bfloat16():
            self._blocked = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
            self._bias = None if bias is None else bias.detach().bfloat16()
        else:
            panels = _panels(weight)
            self._panels = array(panels, panels.dtype)
            self._bias = None
            if bias is not None:
                self._bias = functional.pad(bias.detach().float(), (0, -self.out_features % PANEL))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == self.in_features
        if self._blocked is not None:
            return torch.ops.mkldnn._linear_pointwise(
                x.to(torch.bfloat16), self._blocked, self._bias, "none", [], ""
            ).float()
        num_rows, width = x.shape[0], self.out_features + -self.out_features % PANEL
        y = torch.empty(num_rows, width)
        bias = 0 if self._bias is None else self._bias.data_ptr()
        multiply_panels(*rows_of(x), num_rows, self.in_features, self._panels, bias, y.data_ptr(), width)
        # The last panel may be wider than what is left of the outputs.
        return y if width == self.out_features else y[:, : self.out_features]


def multiplies_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16, and torch was built with oneDNN, which makes use of it."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _panels(weight: torch.Tensor) -> torch.Tensor:
    """`[panels, in_features, 16]`, flat; outputs that fill the last panel up are 0."""
    dtype = weight.dtype if weight.dtype == torch.bfloat16 else torch.float32
    out_features, in_features = weight.shape
    num_panels = -(-out_features // PANEL)
    panels = torch.zeros(num_panels, in_features, PANEL, dtype=dtype)
    whole = out_features // PANEL
    panels[:whole] = weight[: whole * PANEL].view(whole, PANEL, in_features).transpose(1, 2)
    if whole < num_panels:
        panels[whole, :, : out_features - whole * PANEL] = weight[whole * PANEL :].T
    return panels.view(-1)


@helper
def _multiply_rows(x: int, x_step: int, num_rows: int, panels: Any, first: int, size: int, y: int, y_step: int) -> None:
    """All rows times `size` inputs of one panel, in blocks; a remainder of 7 or 8 rows is cut in halves."""
    t = 0
    while t < num_rows:
        rest = num_rows - t
        x0, y0 = x + t * x_step, y + t * y_step
        x1, x2, x3, x4, x5 = x0 + x_step, x0 + 2 * x_step, x0 + 3 * x_step, x0 + 4 * x_step, x0 + 5 * x_step
        y1, y2, y3, y4, y5 = y0 + y_step, y0 + 2 * y_step, y0 + 3 * y_step, y0 + 4 * y_step, y0 + 5 * y_step
        if rest == 6 or rest > 8:
            add_panel((x0, x1, x2, x3, x4, x5), panels, first, size, (y0, y1, y2, y3, y4, y5))
            t += 6
        elif rest == 5:
            add_panel((x0, x1, x2, x3, x4), panels, first, size, (y0, y1, y2, y3, y4))
            t += 5
        elif rest >= 4:
            add_panel((x0, x1, x2, x3), panels, first, size, (y0, y1, y2, y3))
            t += 4
        elif rest == 3:
            add_panel((x0, x1, x2), panels, first, size, (y0, y1, y2))
            t += 3
        elif rest == 2:
            add_panel((x0, x1), panels, first, size, (y0, y1))
            t += 2
        else:
            add_panel((x0,), panels, first, size, (y0,))
            t += 1


@helper
def _multiply_panel(
    panel: int, x: int, x_step: int, num_rows: int, in_features: int, panels: Any, bias: int, y: int, y_step: int
) -> None:
    """The 16 outputs of one panel, of all rows."""
    y_panel = y + 4 * PANEL * panel
    for t in range(num_rows):
        row = floats_at(y_panel + t * y_step)
        for o in range(PANEL):
            row[o] = np.float32(0)
        if bias != 0:
            added = floats_at(bias + 4 * PANEL * panel)
            for o in range(PANEL):
                row[o] = added[o]
    for k in range(0, in_features, BLOCK_INPUTS):
        size = min(BLOCK_INPUTS, in_features - k)
        first = (panel * in_features + k) * PANEL
        _multiply_rows(x + 4 * k, x_step, num_rows, panels, first, size, y_panel, y_step)


@kernel
def multiply_panels(
    x: int,
    x_stride: int,
    num_rows: int,
    in_features: int,
    panels: npt.NDArray[np.float32] | npt.NDArray[np.uint16],
    bias: int,
    y: int,
    y_width: int,
) -> None:
    """`y[t] = x[t] @ weightᵀ + bias`, of addresses; a `bias` of 0 is none.

    `x` has rows `x_stride` elements apart, `y` is contiguous `[num_rows, y_width]`, of whole panels.
    """
    num_panels = y_width // PANEL
    x_step, y_step = 4 * x_stride, 4 * y_width
    if num_rows * in_features * y_width < SERIAL_WORK:
        for panel in range(num_panels):
            _multiply_panel(panel, x, x_step, num_rows, in_features, panels, bias, y, y_step)
    else:
        for panel in prange(num_panels):
            _multiply_panel(panel, x, x_step, num_rows, in_features, panels, bias, y, y_step)
