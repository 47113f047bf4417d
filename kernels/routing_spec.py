"""How a router chooses experts. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RoutingSpec:
    """How a router chooses `top_k` of `num_experts` experts for a token, and their weights.

    An expert's score is its share of the softmax of the token's logits or, with `has_sigmoid`, the sigmoid of its
    logit. The experts with the highest scores are chosen. A router with a bias instead chooses the experts with the
    highest sums of score and bias. Its choice can be limited to the `top_groups` best of `num_groups` groups of
    consecutive experts. Groups are ranked by the total of their two highest sums.

    The weights are the scores of the chosen experts times `scale`. With `normalizes`, they are first divided by their
    sum, or by `min_total` if that is larger.
    """

    num_experts: int
    top_k: int
    normalizes: bool
    has_sigmoid: bool = False
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    min_total: float = 1e-20
