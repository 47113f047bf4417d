"""The routing of tokens to experts, as kernels read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class ExpertWeights(Protocol):
    """One linear layer of each expert: a `StackedExperts`, or a device's own layout."""


@dataclass(frozen=True, slots=True, eq=False)
class StackedExperts:
    """One linear layer of each expert.

    `weight` is `[num_experts, out_features, in_features]`, and `bias` is `[num_experts, out_features]` or None. Both
    are contiguous.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The experts of each token. A pair is a token with one of its experts: pair `t * top_k + j` has `experts[t, j]`.

    `experts` int32 and `weights` float32 `[T, top_k]`; a token's experts are distinct. `pairs` int32 `[T * top_k]`
    lists the pairs by ascending expert: expert `e` has `pairs[starts[e]:starts[e + 1]]`, with `starts` int32
    `[num_experts + 1]`.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    pairs: torch.Tensor
    starts: torch.Tensor

    @property
    def num_pairs(self) -> int:
        return self.experts.numel()

    def pairs_per_row(self, x: torch.Tensor) -> int:
        """Number of pairs that share a row of `x`: `top_k` if it has a row per token, or 1 if it has a row per pair."""
        return self.num_pairs // max(1, x.shape[0])


def group_pairs(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `pairs` and `starts` of a `Routing` on the CPU; `experts` int32 `[T, top_k]`."""
    of_pair = experts.flatten()
    pairs = of_pair.argsort(stable=True).int()
    starts = torch.zeros(num_experts + 1, dtype=torch.int32)
    starts[1:] = torch.bincount(of_pair, minlength=num_experts).cumsum(0)
    return pairs, starts
