"""Mixtures of experts in plain PyTorch."""

from __future__ import annotations

import torch

from loramux.kernels.routing import Routing, group_pairs
from loramux.kernels.routing_spec import RoutingSpec


def route(logits: torch.Tensor, spec: RoutingSpec) -> Routing:
    """Choose the experts of each token from its logits, float32 `[T, num_experts]`.

    If a token's logits contain NaN or positive infinity, it gets the first `top_k` experts with NaN weights.
    """
    shares = logits.softmax(-1)
    is_usable = shares.isfinite().all(-1, keepdim=True)
    # The highest logits are chosen even if their shares round to 0.
    experts = torch.where(is_usable, logits, 0).topk(spec.top_k).indices
    weights = shares.gather(-1, experts)
    if spec.normalizes:
        weights = weights / weights.sum(-1, keepdim=True)
    experts = torch.where(is_usable, experts, torch.arange(spec.top_k)).int()
    pairs, starts = group_pairs(experts, spec.num_experts)
    return Routing(experts, torch.where(is_usable, weights, torch.nan), pairs, starts)


def multiply_experts(x: torch.Tensor, weight: torch.Tensor, routing: Routing) -> torch.Tensor:
    """`y[p] = x[p // pairs_per_row] @ weight[e]ᵀ` for each pair `p`, where `e` is the pair's expert.

    `x` float32 `[T, in_features]` or `[T * top_k, in_features]`; `weight` `[num_experts, out_features, in_features]`.
    """
    rows = x.repeat_interleave(routing.pairs_per_row(x), 0)
    return torch.einsum("pi,poi->po", rows, weight.float()[routing.experts.flatten().long()])


def sum_experts(
    y: torch.Tensor, routing: Routing, shared: torch.Tensor | None, shared_gate: torch.Tensor | None
) -> torch.Tensor:
    """`out[t] = sum over j of weights[t, j] * y[t * top_k + j], plus sigmoid(shared_gate[t]) * shared[t]`.

    `y` float32 `[T * top_k, n]`; `shared` float32 `[T, n]` and `shared_gate` float32 `[T, 1]`, or both None.
    """
    out = (y.unflatten(0, routing.weights.shape) * routing.weights[..., None]).sum(1)
    if shared is not None and shared_gate is not None:
        out += shared_gate.sigmoid() * shared
    return out
