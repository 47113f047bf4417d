"""Mixtures of experts in plain PyTorch."""

from __future__ import annotations

import torch

from loramux.kernels.routing import Routing, StackedExperts


def multiply_experts(x: torch.Tensor, experts: StackedExperts, routing: Routing) -> torch.Tensor:
    """`y[p] = x[p // pairs_per_row] @ weight[e]ᵀ + bias[e]` for each pair `p`, where `e` is the pair's expert.

    `x` float32 `[T, in_features]` or `[T * top_k, in_features]`. Without a bias, nothing is added.
    """
    rows, of_pair = x.repeat_interleave(routing.pairs_per_row(x), 0), routing.experts.flatten().long()
    y = torch.einsum("pi,poi->po", rows, experts.weight.float()[of_pair])
    return y if experts.bias is None else y + experts.bias.float()[of_pair]


def sum_experts(
    y: torch.Tensor, routing: Routing, shared: torch.Tensor | None, shared_gate: torch.Tensor | None
) -> torch.Tensor:
    """`out[t] = sum over j of weights[t, j] * y[t * top_k + j]`, plus `sigmoid(shared_gate[t]) * shared[t]`.

    `y` float32 `[T * top_k, n]`; `shared` float32 `[T, n]` or None. `shared_gate` float32 `[T, 1]`, or None for a
    factor of 1.
    """
    out = (y.unflatten(0, routing.weights.shape) * routing.weights[..., None]).sum(1)
    if shared is not None:
        out += shared if shared_gate is None else shared_gate.sigmoid() * shared
    return out
