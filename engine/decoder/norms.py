"""The norms of the decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from loramux.engine.decoder.layer_adapters import LayerAdapters
from loramux.kernels.dispatch import Kernels
from loramux.kernels.tables import ModuleGroup


class Norm(Protocol):
    """Normalises a block's input (the residual) or its output."""

    def __call__(self, kernels: Kernels, x: torch.Tensor) -> torch.Tensor: ...

    def add(self, kernels: Kernels, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Add `x` to `residual` in place, and return the norm of the sum."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class RmsNorm:
    """`x / sqrt(mean(x²) + eps) * weight`, with `weight` float32 `[size]`."""

    weight: torch.Tensor
    eps: float

    def __call__(self, kernels: Kernels, x: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(x, self.weight, self.eps)

    def add(self, kernels: Kernels, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """`(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, with `weight` and `bias` `[size]` in the dtype of `x`."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float

    def __call__(self, kernels: Kernels, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def add(self, kernels: Kernels, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self(kernels, residual.add_(x))


@dataclass(frozen=True, slots=True, eq=False)
class NoNorm:
    """Returns the residual itself, for families that normalise only the outputs of blocks."""

    def __call__(self, kernels: Kernels, x: torch.Tensor) -> torch.Tensor:
        return x

    def add(self, kernels: Kernels, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual.add_(x)


@dataclass(frozen=True, slots=True, eq=False)
class AdaptableNorm:
    """A norm, and the module with which adapters replace it, or None if they cannot."""

    norm: Norm
    group: ModuleGroup | None

    def __call__(self, x: torch.Tensor, adapters: LayerAdapters) -> torch.Tensor:
        y = self.norm(adapters.kernels, x)
        return adapters.replace_norm(y, self.group) if adapters.replaces_norms else y
