"""The activation xIELU (Huang and Schlag, 2024), whose parameters each layer learns."""

from __future__ import annotations

import torch
from torch.nn import functional

from loramux.engine.architectures.feed_forward_config import XIELU_PREFIX, XIELU_SHAPES
from loramux.engine.decoder.placement import Placement


class Xielu:
    """`p * x² + b * x` for positive `x`, otherwise `n * (exp(min(x, eps)) - 1 - x) + b * x`."""

    def __init__(self, place: Placement, prefix: str) -> None:
        found = {name: place.finite(f"{prefix}.{XIELU_PREFIX}.{name}", shape) for name, shape in XIELU_SHAPES.items()}
        # transformers computes the following values in the dtype of the weights.
        rounded = {name: tensor.to(place.dtype) for name, tensor in found.items()}
        self._beta, self._eps = rounded["beta"].item(), rounded["eps"].item()
        self._positive = functional.softplus(rounded["alpha_p"]).item()
        self._negative = (rounded["beta"] + functional.softplus(rounded["alpha_n"])).item()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        linear = self._beta * x
        negative = (torch.expm1(x.clamp(max=self._eps)) - x) * self._negative + linear
        return torch.where(x > 0, self._positive * x * x + linear, negative)
