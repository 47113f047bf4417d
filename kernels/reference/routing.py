"""The choice of experts in plain PyTorch."""

from __future__ import annotations

import torch

from loramux.kernels.routing import Routing, group_pairs
from loramux.kernels.routing_spec import RoutingSpec


def route(
    logits: torch.Tensor,
    spec: RoutingSpec,
    bias: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
) -> Routing:
    """Choose the experts of each token from its logits, float32 `[T, num_experts]`.

    `bias` and `expert_scales` are float32 `[num_experts]` and finite. If the softmax of a token's logits is undefined,
    because one is NaN or positive infinity or all are negative infinity, the token gets the first `top_k` experts, with
    NaN weights. Among equal experts or groups, the first are chosen.
    """
    shares = logits.softmax(-1)
    is_usable = shares.isfinite().all(-1, keepdim=True)
    scores = logits.sigmoid() if spec.has_sigmoid else shares
    # Without a bias, compare logits, which differ even if they are so low that all their sigmoids are 0.
    keys = torch.where(is_usable, logits if bias is None else scores + bias, 0)
    if bias is not None and spec.top_groups < spec.num_groups:
        groups = keys.unflatten(-1, (spec.num_groups, -1))
        best = _highest(groups.topk(2).values.sum(-1), spec.top_groups)
        is_chosen = torch.zeros(groups.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        keys = groups.masked_fill(~is_chosen[..., None], -torch.inf).flatten(-2)
    experts = _highest(keys, spec.top_k)
    weights = scores.gather(-1, experts)
    if spec.normalizes:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=spec.min_total)
    experts = torch.where(is_usable, experts, torch.arange(spec.top_k)).int()
    weights = torch.where(is_usable, weights * spec.scale, torch.nan)
    if expert_scales is not None:
        weights = weights * expert_scales[experts]
    return Routing(experts, weights, *group_pairs(experts, spec.num_experts))


def _highest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The indices of the highest values in each row, in descending order."""
    return values.argsort(dim=-1, descending=True, stable=True)[..., :count]
