"""A linear layer whose weight is laid out for the CPU.

Products with a bfloat16 weight use `amx.py` if the CPU has AMX and Linux lets the process use it, `avx512_bf16.py` if
the CPU has AVX512_BF16, and oneDNN on an ARM CPU with bfloat16 instructions. Otherwise, this file computes them in
float32 with AVX2 or AVX-512, still reading only two bytes per weight. `quantized_linear.py` multiplies by 8-bit and
4-bit weights.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from numba import prange
from torch.nn import functional

from loramux.kernels.cpu.instructions.amx import AmxPanels, has_amx
from loramux.kernels.cpu.instructions.arrays import array, rows_of
from loramux.kernels.cpu.instructions.avx512_bf16 import Avx512Bf16Panels
from loramux.kernels.cpu.instructions.blocks import add_panels, begin_outputs
from loramux.kernels.cpu.instructions.compiled import cpu_features, helper, kernel
from loramux.kernels.cpu.instructions.vectors import PANEL

BLOCK_INPUTS = 256
"""Inputs in a block of a panel. The block, 8 KiB in bfloat16, stays in the L1 cache while all rows use it."""

SERIAL_WORK = 200_000
"""Number of multiplications below which waking other threads costs more than it saves."""

ROWS_HINT = 16
"""Number of rows for which oneDNN optimises the layout of a weight, about as many as in a busy server's decode step."""


class PackedLinear:
    """`y = x @ weightᵀ + bias` for float32 `x` `[T, in_features]`.

    Each row of `x` and `y` is contiguous, and rows may be any distance apart.

    One copy of the weight `[out_features, in_features]` is kept, laid out for this CPU. If the weight is bfloat16 and
    the CPU has bfloat16 instructions, `x` is rounded to bfloat16. A row's result is bitwise independent of the other
    rows, except with oneDNN, which does not guarantee this.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        make = product_of(weight.dtype)
        self.product: Product = make(weight.detach(), None if bias is None else bias.detach())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == self.in_features
        return self.product(x)


class Product(Protocol):
    """Multiplies by a weight that it holds in its own layout."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


def product_of(dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor | None], Product]:
    """The class that computes products with weights of `dtype` fastest on this CPU.

    oneDNN is used only on ARM. On x86 it is slower, or only emulates bfloat16.
    """
    if dtype == torch.bfloat16:
        if has_amx():
            return AmxPanels
        if "avx512bf16" in cpu_features():
            return Avx512Bf16Panels
        has_onednn = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        if has_onednn and platform.machine().lower() not in ("x86_64", "amd64"):
            return OneDnnProduct
    return FloatPanels


class OneDnnProduct:
    """A weight in oneDNN's blocked bfloat16 layout. `y` is rounded to bfloat16 too."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS_HINT)
        self.bias = None if bias is None else bias.bfloat16()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.ops.mkldnn._linear_pointwise(x.to(torch.bfloat16), self._weight, self.bias, "none", [], "")
        return y.float()


class FloatPanels:
    """A weight in panels of 16 outputs. Any dtype except bfloat16 is converted to float32. Sums are float32."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self._in_features = weight.shape
        panels = float_panels(weight)
        self.panels = array(panels, panels.dtype)
        self.bias = None if bias is None else functional.pad(bias.float(), (0, -self.out_features % PANEL))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows, width = x.shape[0], self.out_features + -self.out_features % PANEL
        y = torch.empty(num_rows, width)
        bias = 0 if self.bias is None else self.bias.data_ptr()
        multiply_panels(*rows_of(x), num_rows, self._in_features, self.panels, bias, y.data_ptr(), width)
        # The last panel may extend past the last output.
        return y if width == self.out_features else y[:, : self.out_features]


def float_panels(weight: torch.Tensor) -> torch.Tensor:
    """Rearrange a weight as `[panels, in_features, 16]`, flattened. The last panel is padded with 0."""
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
def multiply_panel(
    panel: int, x: int, x_step: int, num_rows: int, in_features: int, panels: Any, bias: int, y: int, y_step: int
) -> None:
    """Compute the 16 outputs of one panel for all rows."""
    y_panel = y + 4 * PANEL * panel
    begin_outputs(y_panel, y_step, num_rows, PANEL, 0 if bias == 0 else bias + 4 * PANEL * panel)
    for k in range(0, in_features, BLOCK_INPUTS):
        size = min(BLOCK_INPUTS, in_features - k)
        first = (panel * in_features + k) * PANEL
        add_panels(x + 4 * k, x_step, num_rows, panels, first, PANEL, size, y_panel, y_step)


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
    """`y[t] = x[t] @ weightᵀ + bias`. `x`, `bias` and `y` are addresses, and `bias` 0 means no bias.

    Rows of `x` are `x_stride` elements apart. `y` is contiguous `[num_rows, y_width]` and contains whole panels.
    """
    num_panels = y_width // PANEL
    x_step, y_step = 4 * x_stride, 4 * y_width
    if num_rows * in_features * y_width < SERIAL_WORK:
        for panel in range(num_panels):
            multiply_panel(panel, x, x_step, num_rows, in_features, panels, bias, y, y_step)
    else:
        for panel in prange(num_panels):
            multiply_panel(np.int64(panel), x, x_step, num_rows, in_features, panels, bias, y, y_step)
