"""Angles of the rotary position embedding (Su et al., 2021), for each position of the context."""

from __future__ import annotations

import math

import torch

from loramux.engine.architectures.rope_config import QueryScaling, RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_len: int) -> torch.Tensor:
    """Angle by which each pair of channels rotates per position, float32 `[num_pairs]`.

    `linear` divides every frequency by the factor. `proportional` does the same, and sets the frequencies of channels
    that are not rotated to 0. `dynamic` raises theta for contexts longer than the original context. `llama3` divides
    only low frequencies, with a smooth transition (Llama 3.1's published scaling), and `yarn` divides only frequencies
    that make few turns within the original context (Peng et al., 2023). `longrope` divides each frequency by its own
    factor (Ding et al., 2024), taken from one list for contexts up to the original length and from another for longer
    contexts. `max_len`, the longest context served, determines the theta or the list that all sequences use. A growing
    sequence cannot switch, because the K of its early positions is already cached.
    """
    if rope.kind == "none":
        # Without rotation, one pair of channels with an angle of 0 is enough.
        return torch.zeros(1)
    if rope.kind == "proportional":
        num_rotated = int(rope.rotary_fraction * head_dim // 2)
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / rope.theta**exponents / rope.factor
        return torch.where(torch.arange(head_dim // 2) < num_rotated, frequencies, 0.0)
    rotary_dim = int(head_dim * rope.rotary_fraction)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    periods = _theta(rope, rotary_dim, max_len) ** exponents
    if rope.kind == "longrope":
        factors = rope.long_factors if max_len > rope.original_max_len else rope.short_factors
        return 1.0 / (torch.tensor(factors) * periods)
    frequencies = 1.0 / periods
    if rope.kind in ("default", "dynamic"):
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "yarn":
        scaled = _scaled_share(rope, rotary_dim)
        return scaled * frequencies / rope.factor + (1 - scaled) * frequencies
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_len / wavelengths
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


def _theta(rope: RopeConfig, rotary_dim: int, max_len: int) -> float:
    if rope.kind != "dynamic" or max_len <= rope.original_max_len:
        return rope.theta
    stretch = rope.factor * max_len / rope.original_max_len - (rope.factor - 1)
    return rope.theta * float(stretch ** (rotary_dim / (rotary_dim - 2)))


def _scaled_share(rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """How much YaRN scales each frequency: 0 for high frequencies, 1 for low frequencies, linear in between."""

    def pair_of(turns: float) -> float:
        """The pair of channels that makes `turns` turns within the original context."""
        return rotary_dim * math.log(rope.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.fast_turns), pair_of(rope.slow_turns)
    if rope.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    return ((torch.arange(rotary_dim // 2).float() - low) / (high - low)).clamp(0.0, 1.0)


def rotary_tables(rope: RopeConfig, head_dim: int, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of each position's angles, times `attention_factor`, float32 `[max_len, num_pairs]` each."""
    angles = torch.outer(torch.arange(max_len).float(), inverse_frequencies(rope, head_dim, max_len))
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor


def query_scales(rope: RopeConfig, max_len: int) -> torch.Tensor | None:
    """The factors by which `query_growth` scales q at each position, float32 `[max_len, 1, 1]`. None if all are 1."""
    if rope.query_growth == 0 or max_len <= rope.original_max_len:
        return None
    spans = (torch.arange(max_len).float() / rope.original_max_len).floor()
    return (1 + rope.query_growth * torch.log(1 + spans)).view(-1, 1, 1)


def growing_scales(scaling: QueryScaling, max_len: int) -> torch.Tensor | None:
    """The factors by which `scaling` scales q at each position, float32 `[max_len, 1, 1]`. None if all are 1."""
    if max_len < scaling.span:
        return None
    spans = ((torch.arange(max_len).float() + 1) / scaling.span).floor()
    return (1 + scaling.growth * torch.log1p(spans)).view(-1, 1, 1)


def in_halves(heads: torch.Tensor, num_pairs: int) -> torch.Tensor:
    """Move channels `2 * i` and `2 * i + 1` of each head to `i` and `num_pairs + i`, which kernels rotate together.

    `heads` is `[num_tokens, num_heads, head_dim]`. If q and k are reordered alike, their products stay the same.
    """
    pairs = heads[..., : 2 * num_pairs].reshape(*heads.shape[:-1], num_pairs, 2).transpose(-1, -2).flatten(-2)
    return pairs if pairs.shape[-1] == heads.shape[-1] else torch.cat((pairs, heads[..., 2 * num_pairs :]), -1)
