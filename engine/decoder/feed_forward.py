"""A feed-forward block that all tokens use: a dense layer's block, or the shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from loramux.engine.architectures.feed_forward_config import XIELU_PREFIX, XIELU_SHAPES
from loramux.engine.decoder.altup import sparse_gate
from loramux.engine.decoder.decoder_step import DecoderStep
from loramux.engine.decoder.layer_adapters import AdaptableLinear, LayerAdapters
from loramux.engine.decoder.placement import Placement
from loramux.kernels.tables import ModuleGroup


class Xielu:
    """The activation xIELU (Huang and Schlag, 2024), whose parameters each layer learns.

    `p * x² + b * x` for positive `x`, otherwise `n * (exp(min(x, eps)) - 1 - x) + b * x`.
    """

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


@dataclass(frozen=True, slots=True, eq=False)
class FeedForward:
    """The weights of one block, with gate/up fused.

    `xielu` is the layer's own activation, or None. `sparsity` is the multiplier of `sparse_gate`, or None.
    """

    gate_up: AdaptableLinear
    down: AdaptableLinear
    xielu: Xielu | None
    sparsity: float | None

    @property
    def groups(self) -> tuple[ModuleGroup, ...]:
        return self.gate_up.group, self.down.group

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, step: DecoderStep, adapters: LayerAdapters
    ) -> torch.Tensor:
        """`x` `[num_tokens, hidden_size]` is the normalised `residual`, which only mixtures read."""
        inner = self.gate_up(x, adapters)
        if self.sparsity is not None:
            inner = sparse_gate(inner, self.sparsity)
        inner = step.activate(inner) if self.xielu is None else self.xielu(inner)
        return self.down(inner, adapters)
