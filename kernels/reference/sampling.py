"""Samples each row's next token in plain PyTorch: the specification and test oracle for `gpu/sampling.py`."""

from __future__ import annotations

import torch


def kept_weights(
    logits: torch.Tensor, temperature: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """The weights from which each row samples, float64 `[S, V]`; 0 for tokens that the row's settings exclude.

    With `d = max(logits) - logits` in float32 and `weight = exp(-d / temperature)`, a token is kept if `weight >=
    min_p`, fewer than `top_k` tokens (0: off) have a smaller `d`, and those tokens together have less than the share
    `top_p` of the total weight of the tokens that `top_k` keeps. The most likely tokens are always kept, and equally
    likely tokens are kept or excluded together.

    Shapes and dtypes are as for `sample_tokens`. Logits are finite, and every temperature is above 0.
    """
    rows = logits.float()
    distance = rows.amax(1, keepdim=True) - rows
    weights = torch.exp(-distance.double() / temperature.double()[:, None])
    ordered, order = distance.sort(dim=1, stable=True)
    # Number of tokens that are strictly nearer to the largest logit: the index of the first equal distance.
    num_nearer = torch.searchsorted(ordered, ordered)
    running = weights.gather(1, order).cumsum(1)
    mass_nearer = torch.where(num_nearer > 0, running.gather(1, (num_nearer - 1).clamp(min=0)), 0.0)
    k = torch.where(top_k > 0, top_k, logits.shape[1])[:, None]
    is_among_k = num_nearer < k
    total = running.gather(1, is_among_k.sum(1, keepdim=True) - 1)
    mass = torch.where(top_p[:, None] < 1, top_p.double()[:, None] * total, torch.inf)
    is_kept = is_among_k & (mass_nearer < mass) | (num_nearer == 0)
    is_kept = torch.empty_like(is_kept).scatter_(1, order, is_kept)
    return torch.where(is_kept & (weights >= min_p.double()[:, None]), weights, 0.0)


def reference_sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    out_tokens: torch.Tensor,
) -> None:
    """Write each row's token to `out_tokens`, or -1 if any of the row's logits is not finite.

    At temperature 0, the token is the first index of the largest logit. Otherwise, it is the first index at which the
    running sum of `kept_weights` exceeds `uniform` times their sum. The tensors are as for `sample_tokens`. Sums are
    float64.
    """
    rows = logits.float()
    out_tokens.copy_(torch.where(torch.isfinite(rows).all(1), rows.argmax(1), -1))
    drawn = ((out_tokens >= 0) & (temperature > 0)).nonzero().squeeze(1)
    weights = kept_weights(rows[drawn], temperature[drawn], top_k[drawn], top_p[drawn], min_p[drawn])
    running = weights.cumsum(1)
    target = uniform[drawn].double()[:, None] * running[:, -1:]
    out_tokens[drawn] = ((running > target) & (weights > 0)).to(torch.int8).argmax(1).to(torch.int32)
