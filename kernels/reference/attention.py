"""Attention over paged K and V, and storing a step's K and V in their pages, in plain PyTorch."""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from loramux.kernels.tables import AttentionBatch, AttentionSpec, ContiguousKeys, PoolViews

LARGEST_CODE = 127
SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32. Scales are at least as large, so that their inverses are finite."""


def to_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows `[..., head_dim]` to int8 codes, with one bfloat16 scale `[...]` for each row.

        scale = bfloat16(max(max |x| / 127, SMALLEST_SCALE))
        code = round(x / scale)    (to nearest, ties to even)

    The scale of a row that contains infinity or NaN is NaN, and its codes are 0, so all of its values become NaN.
    """
    largest = x.float().abs().amax(-1)
    scale = (largest / LARGEST_CODE).clamp_min(SMALLEST_SCALE).bfloat16()
    is_finite = largest < torch.inf
    codes = torch.where(is_finite[..., None], x.float() / scale.float()[..., None], 0.0)
    return codes.round().to(torch.int8), torch.where(is_finite, scale, torch.nan)


def kv_write(k: torch.Tensor, v: torch.Tensor, pool: PoolViews, layer: int, batch: AttentionBatch) -> None:
    """Store K and V of row `t` at `batch.kv_slots[t]`, rounded to the pool's dtype (to nearest, ties to even).

    `k` and `v` float32 `[T, num_kv_heads, head_dim]`. A row with a negative slot is not stored. In a pool of int8
    codes, `to_codes` rounds each row of each head.
    """
    page_tokens = pool.geometry.page_tokens
    keys, values, step = _kv_pages(pool, k.shape[1], k.shape[2])
    is_stored = batch.kv_slots >= 0
    kv_slots = batch.kv_slots[is_stored]
    page, place = kv_slots // page_tokens * step + layer, kv_slots % page_tokens
    k, v = k[is_stored], v[is_stored]
    scales = _kv_scales(pool, k.shape[1], k.shape[2])
    if scales is not None:
        k, scales[0][page, :, place] = to_codes(k)
        v, scales[1][page, :, place] = to_codes(v)
    keys[page, :, :, place] = k.to(keys.dtype)
    values[page, :, place, :] = v.to(values.dtype)


def paged_attention(
    q: torch.Tensor,
    pool: PoolViews,
    layer: int,
    batch: AttentionBatch,
    spec: AttentionSpec,
    out: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> None:
    """`out[t] = softmax(soft_cap(q[t] kᵀ * scale) + mask) v` over the context of row `t`'s sequence.

    `q` and `out` float32 `[T, num_heads, head_dim]`; head `h` reads KV head `h // (num_heads // num_kv_heads)`. The
    query at position `p` sees keys `[0, p]` or, with a window, `[max(0, p - sliding_window + 1), p]`. Sequences without
    query rows are skipped, and so are rows that belong to no sequence. `soft_cap(s) = cap * tanh(s / cap)`. `sinks`,
    float32 `[num_heads]`, contains for each head the score of an additional key that takes part in the softmax but has
    no value (Xiao et al., 2023). Pool elements outside the contexts are never used, not even multiplied by zero.
    """
    page_tokens = pool.geometry.page_tokens
    keys, values, step = _kv_pages(pool, spec.num_kv_heads, spec.head_dim)
    scales = _kv_scales(pool, spec.num_kv_heads, spec.head_dim)
    for i, length in enumerate(batch.seq_lens.tolist()):
        begin, end = int(batch.cu_q[i]), int(batch.cu_q[i + 1])
        if begin == end:
            continue
        # The list may omit the pages before the first visible key.
        first_key = 0 if spec.sliding_window is None else max(0, length - (end - begin) + 1 - spec.sliding_window)
        first_page, last_page = first_key // page_tokens, -(-length // page_tokens)
        first_listed = int(batch.page_starts[i])
        pages = batch.pages[first_listed + first_page : first_listed + last_page].long() * step + layer
        seen = slice(first_key - first_page * page_tokens, length - first_page * page_tokens)
        k = keys[pages].permute(1, 0, 3, 2).flatten(1, 2)[:, seen].float()  # [num_kv_heads, num_seen, head_dim]
        v = values[pages].permute(1, 0, 2, 3).flatten(1, 2)[:, seen].float()
        if scales is not None:
            k_scales, v_scales = (one[pages].transpose(0, 1).flatten(1)[:, seen, None].float() for one in scales)
            k, v = k * k_scales, v * v_scales
        group_size = spec.num_heads // spec.num_kv_heads
        scores = torch.einsum("thd,hsd->hts", q[begin:end], k.repeat_interleave(group_size, 0)) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        position = torch.arange(length - (end - begin), length)[:, None]
        key = torch.arange(first_key, length)
        is_hidden = key > position
        if spec.sliding_window is not None:
            is_hidden |= key <= position - spec.sliding_window
        scores = scores.masked_fill(is_hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, scores.shape[1], 1)), -1)
        weights = torch.softmax(scores, -1)[..., : k.shape[1]]
        out[begin:end] = torch.einsum("hts,hsd->thd", weights, v.repeat_interleave(group_size, 0))


def contiguous_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: ContiguousKeys,
    spec: AttentionSpec,
    out: torch.Tensor,
) -> None:
    """`paged_attention` of the prefills of `keys`, whose K and V are rows of `k` and `v`.

    `k` and `v` `[num_keys, num_kv_heads, head_dim]`, and `q` and `out` `[T, num_heads, head_dim]`, of any one dtype.
    Other rows of `out` are not specified, and `spec` has no soft cap.
    """
    cu_q, cu_k = keys.cu_q.tolist(), keys.cu_k.tolist()
    for prefill in range(1, len(cu_q) - 1, 2):
        rows, seen = slice(cu_q[prefill], cu_q[prefill + 1]), slice(cu_k[prefill], cu_k[prefill + 1])
        length = seen.stop - seen.start
        position = torch.arange(length - (rows.stop - rows.start), length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)
        is_visible = key <= position
        if spec.sliding_window is not None:
            is_visible &= key > position - spec.sliding_window
        heads = [one.transpose(0, 1)[None] for one in (q[rows], k[seen], v[seen])]
        with sdpa_kernel(SDPBackend.MATH):
            found = functional.scaled_dot_product_attention(
                heads[0], heads[1], heads[2], attn_mask=is_visible, scale=spec.scale, enable_gqa=True
            )
        out[rows] = found[0].transpose(0, 1)


def _kv_pages(pool: PoolViews, num_kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """K as `[P * L, num_kv_heads, head_dim, page_tokens]`, V as `[P * L, num_kv_heads, page_tokens, head_dim]`, and L,
    the number of layers of a page.
    """
    page_tokens, kv = pool.geometry.page_tokens, pool.kv_of(num_kv_heads, head_dim)
    half = num_kv_heads * head_dim * page_tokens
    pages = kv.flatten(0, 1)
    return (
        pages[:, :half].unflatten(1, (num_kv_heads, head_dim, page_tokens)),
        pages[:, half:].unflatten(1, (num_kv_heads, page_tokens, head_dim)),
        kv.shape[1],
    )


def _kv_scales(pool: PoolViews, num_kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The scales of K and of V, both `[P * L, num_kv_heads, page_tokens]`, or None if the pool has no codes."""
    scales = pool.scales_of(num_kv_heads, head_dim)
    if scales is None:
        return None
    page_tokens = pool.geometry.page_tokens
    pages = scales.flatten(0, 1)[:, : 2 * num_kv_heads * page_tokens]
    k_scales, v_scales = pages.unflatten(1, (2, num_kv_heads, page_tokens)).unbind(1)
    return k_scales, v_scales
