"""Products by quantised weights in plain PyTorch."""

from __future__ import annotations

import torch

from loramux.kernels.quantized import QuantizedWeight


def multiply_codes(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`y = x @ weightᵀ + bias` in float64, with the values of `QuantizedWeight.dequantize`. `x` `[T, in_features]`."""
    y = x.double() @ torch.from_numpy(weight.dequantize()).double().T
    return y if bias is None else y + bias.double()
