"""A mixture of experts: the router of one layer, its experts, and the weight of the shared expert's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from loramux.engine.model.mixture_config import MixtureConfig
from loramux.engine.model.placement import Placement
from loramux.kernels.dispatch import Kernels
from loramux.kernels.layout import LinearShape


class Mixture:
    """The mixture of one layer, without the shared expert's own linears, which are those of a dense layer."""

    def __init__(self, config: MixtureConfig, hidden_size: int, place: Placement, prefix: str) -> None:
        self._routing = config.routing
        num_experts = config.routing.num_experts
        # One product computes the logits of the experts and of the shared expert's gate.
        self._router = place.linear(prefix, config.router_linears(hidden_size), has_bias=False)
        make = place.backend.make_experts
        self._gate_up = make(num_experts, _gate_up_weights(config, hidden_size, place, prefix))
        self._down = make(num_experts, _down_weights(config, hidden_size, place, prefix))

    def __call__(
        self,
        x: torch.Tensor,
        shared: torch.Tensor | None,
        kernels: Kernels,
        gate_and_mul: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """The layer's output for `x` `[num_tokens, hidden_size]`; `shared` is the output of the shared expert."""
        logits = self._router(x)
        num_experts = self._routing.num_experts
        routing = kernels.route(logits[:, :num_experts], self._routing)
        inner = gate_and_mul(kernels.multiply_experts(x, self._gate_up, routing))
        y = kernels.multiply_experts(inner, self._down, routing)
        return kernels.sum_experts(y, routing, shared, None if shared is None else logits[:, num_experts:])


def _gate_up_weights(config: MixtureConfig, hidden_size: int, place: Placement, prefix: str) -> Iterator[torch.Tensor]:
    """Each expert's gate and up weights, `[2 * expert_size, hidden_size]`."""
    names, size, num_experts = config.names, config.expert_size, config.routing.num_experts
    if names.up is None:
        yield from place.tensor(f"{prefix}.{names.experts}.{names.gate}.weight", (num_experts, 2 * size, hidden_size))
        return
    for expert in range(num_experts):
        parts = [LinearShape(f"{names.experts}.{expert}.{name}", hidden_size, size) for name in (names.gate, names.up)]
        yield place.fused_weight(prefix, parts)


def _down_weights(config: MixtureConfig, hidden_size: int, place: Placement, prefix: str) -> Iterator[torch.Tensor]:
    """Each expert's down weight, `[hidden_size, expert_size]`."""
    names, size, num_experts = config.names, config.expert_size, config.routing.num_experts
    if names.up is None:
        yield from place.tensor(f"{prefix}.{names.experts}.{names.down}.weight", (num_experts, hidden_size, size))
        return
    for expert in range(num_experts):
        yield place.tensor(f"{prefix}.{names.experts}.{expert}.{names.down}.weight", (hidden_size, size))
