"""How a router chooses experts, without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """How a router chooses experts: the `top_k` highest of `num_experts` logits, weighted by the softmax of all logits.

    With `normalizes`, a token's weights are divided by their sum.
    """

    num_experts: int
    top_k: int
    normalizes: bool
