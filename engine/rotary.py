"""Angles of the rotary position embedding (Su et al., 2021), for each position of the context."""

from __future__ import annotations

import math

import torch

from loramux.engine.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle per position of each pair of channels, float32 `[head_dim / 2]`.

    `linear` divides every frequency by the factor; `llama3` divides only those with a wavelength beyond the original
    context, with a smooth step between (Llama 3.1's published scaling).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_len / wavelengths
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


def rotary_tables(rope: RopeConfig, head_dim: int, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of each position's angles, float32 `[max_len, head_dim / 2]` each."""
    angles = torch.outer(torch.arange(max_len).float(), inverse_frequencies(rope, head_dim))
    return angles.cos(), angles.sin()
