"""Norms, rotary embedding and gates in plain PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps) * weight` over the last axis; `x` float32 `[..., n]`, `weight` float32 `[n]`."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Add `x` to `residual` in place, and return `rms_norm` of the sum. Both are float32 `[T, n]`."""
    residual += x
    return rms_norm(residual, weight, eps)


def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate `(a, b)`, the halves of the first `2 * n` elements of each head, to `(a cos - b sin, b cos + a sin)`.

    `q` float32 `[T, num_heads, head_dim]` and `k` float32 `[T, num_kv_heads, head_dim]` are changed in place;
    `cos` and `sin` float32 `[T, n]`, `2 * n <= head_dim`.
    """
    n = cos.shape[1]
    for heads in (q, k):
        a, b = heads[..., :n].clone(), heads[..., n : 2 * n].clone()
        heads[..., :n] = a * cos[:, None] - b * sin[:, None]
        heads[..., n : 2 * n] = b * cos[:, None] + a * sin[:, None]


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gate * sigmoid(gate) * up` `[T, n]` from float32 `gate_up` `[T, 2 * n]`, which contains gate, then up."""
    gate, up = gate_up.chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def clamped_silu_and_mul(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """`gate * sigmoid(alpha * gate) * (up + 1)` `[T, n]`; float32 `gate_up` `[T, 2 * n]` contains gate, then up.

    Beforehand, `gate` is clamped to `(-inf, limit]` and `up` is clamped to `[-limit, limit]`.
    """
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` `[T, n]` with the tanh form of gelu; float32 `gate_up` `[T, 2 * n]` contains gate, then up."""
    gate, up = gate_up.chunk(2, -1)
    return functional.gelu(gate, approximate="tanh") * up
