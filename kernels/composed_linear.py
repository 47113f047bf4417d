"""Linear layers that are made of others, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Linear = Callable[[torch.Tensor], torch.Tensor]


class ReorderedLinear:
    """A linear layer with reordered inputs. Input `i` is element `inputs[i]` of each row of `x`; `inputs` is int64."""

    def __init__(self, linear: Linear, inputs: torch.Tensor) -> None:
        self.linear = linear
        self.inputs = inputs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.index_select(1, self.inputs))


class JoinedLinear:
    """Linear layers that share an input, as one that concatenates their outputs.

    Fusing them would be faster, but the codes of different formats cannot be concatenated.
    """

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = linears

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([linear(x) for linear in self.linears], dim=1)
