"""A linear layer with a quantised weight on a GPU."""

from __future__ import annotations

import torch

from loramux.kernels.gpu.linear.coded_products import multiply_codes
from loramux.kernels.gpu.linear.coded_weights import CodedWeights, place_codes
from loramux.kernels.gpu.linear.dequantized_products import add_dequantized, multiply_dequantized
from loramux.kernels.gpu.linear.scaled_products import ScaledWeight, multiply_scaled, scaled_weight
from loramux.kernels.quantized import QuantizedWeight

MIN_DEQUANTIZED_ROWS = 512
"""Minimum number of rows for which dequantising the weight first is faster in every format (measured on an H200)."""


def make_coded_linear(
    weight: QuantizedWeight, bias: torch.Tensor | None, device: torch.device, *, rounds_inputs: bool = False
) -> CodedLinear | RoundingLinear | None:
    """The linear layer of a quantised weight, or None if the kernels do not support the weight (see `place_codes`).

    With `rounds_inputs`, the layer rounds its inputs to FP8 in large steps if `scaled_weight` supports the weight.
    """
    placed = place_codes([weight], 1, None if bias is None else bias[None], device)
    if placed is None:
        return None
    linear = CodedLinear(placed)
    scaled = scaled_weight(weight, placed) if rounds_inputs else None
    return linear if scaled is None else RoundingLinear(linear, scaled)


class CodedLinear:
    """`y = x @ weightᵀ + bias` for `x` `[T, in_features]`. Only the codes of the weight are kept."""

    def __init__(self, weights: CodedWeights) -> None:
        self._weights = weights

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        multiply = multiply_dequantized if x.shape[0] >= MIN_DEQUANTIZED_ROWS else multiply_codes
        return multiply(x, self._weights)

    def add_to(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """`y += x @ weightᵀ` for at least MIN_DEQUANTIZED_ROWS rows. The layer has no bias."""
        assert x.shape[0] >= MIN_DEQUANTIZED_ROWS
        add_dequantized(x, self._weights, y)


class RoundingLinear:
    """A `CodedLinear` with an FP8 weight that rounds `x` to FP8 where `CodedLinear` dequantises the weight.

    torch's product of FP8 numbers cannot add to a tensor, so adapters are added after it.
    """

    x_bits = 8

    def __init__(self, linear: CodedLinear, weight: ScaledWeight) -> None:
        self._linear = linear
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] >= MIN_DEQUANTIZED_ROWS:
            return multiply_scaled(x, self._weight)
        return self._linear(x)
