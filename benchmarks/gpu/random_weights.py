"""Random weights of a model, made on the device. Needs only torch, because a peer's process makes the same weights."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Random weights that preserve the magnitude of activations. Each tensor's seed is derived from its name."""

    device: torch.device
    dtype: torch.dtype

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device=self.device)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        spread = 1.0 if "embed_tokens" in name else shape[1] ** -0.5
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0.0, spread, generator=generator)
