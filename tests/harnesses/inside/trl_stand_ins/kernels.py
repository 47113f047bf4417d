"""Stands for the package with which TRL fetches FlashAttention from a hub: the same attention, on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention


def get_kernel(name: str, version: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(flash_attn_varlen_func=_attention)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    *_: int,
    softmax_scale: float,
    **options: object,
) -> torch.Tensor:
    """Causal attention of several sequences, whose rows lie one after the other: [rows, heads, head size]."""
    if options != {"causal": True, "window_size": (-1, -1)}:
        raise NotImplementedError(str(options))
    repeats = query.shape[1] // key.shape[1]
    outputs = []
    for index in range(len(query_starts) - 1):
        rows = slice(query_starts[index], query_starts[index + 1])
        seen = slice(key_starts[index], key_starts[index + 1])
        q, k, v = (one.transpose(0, 1) for one in (query[rows], key[seen], value[seen]))
        k, v = (one.repeat_interleave(repeats, 0) for one in (k, v))
        mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
        outputs.append(scaled_dot_product_attention(q, k, v, mask, scale=softmax_scale).transpose(0, 1))
    return torch.cat(outputs)
