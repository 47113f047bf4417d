from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from loramux.kernels.tables import AttentionBatch, AttentionSpec, ContiguousKeys, PoolViews

LAYER = 1


def batch_of(
    contexts: Sequence[int],
    num_queries: Sequence[int],
    pages: torch.Tensor,
    poison: int,
    *,
    listed_backwards: bool = False,
) -> AttentionBatch:
    """A batch of sequences that take their pages from `pages` in order.

    Poison values surround the sequences' page lists. `listed_backwards` puts the last sequence's list first, so that
    `page_starts` decreases.
    """
    counts = [-(-length // 16) for length in contexts]
    owned = list(pages[: sum(counts)].split(counts))
    listed = [torch.full((2,), poison, dtype=torch.int32)]
    page_starts = [0] * len(contexts)
    order = range(len(contexts))
    for i in reversed(order) if listed_backwards else order:
        page_starts[i] = sum(part.shape[0] for part in listed)
        listed += [owned[i], torch.full((1 + i % 2,), poison, dtype=torch.int32)]
    kv_slots = []
    for own, length, rows in zip(owned, contexts, num_queries, strict=True):
        position = torch.arange(length - rows, length)
        kv_slots.append(own.long()[position // 16] * 16 + position % 16)
    return AttentionBatch(
        cu_q=torch.tensor([0, *accumulate(num_queries)], dtype=torch.int32),
        seq_lens=torch.tensor(contexts, dtype=torch.int32),
        pages=torch.cat(listed),
        page_starts=torch.tensor(page_starts, dtype=torch.int32),
        kv_slots=torch.cat(kv_slots),
        max_q=max(num_queries),
    )


def free_unseen(batch: AttentionBatch, window: int | None, pool: PoolViews, poison: int) -> AttentionBatch:
    """Fill the pages that no row sees through its window with NaN, and remove them from the list."""
    if window is None:
        return batch
    pages = batch.pages.clone()
    for i, length in enumerate(batch.seq_lens.tolist()):
        first_row = length - int(batch.cu_q[i + 1] - batch.cu_q[i])
        first = int(batch.page_starts[i])
        unseen = slice(first, first + max(0, first_row + 1 - window) // 16)
        filled = pool.kv if pool.kv_scales is None else pool.kv_scales
        filled.flatten(0, 1)[pages[unseen].long() * pool.kv.shape[1] + LAYER] = torch.nan
        pages[unseen] = poison
    return replace(batch, pages=pages)


def in_groups(pool: PoolViews, pages: torch.Tensor) -> tuple[PoolViews, torch.Tensor]:
    """The pool and its pages as seen by a group of layers that starts at the pool's first layer."""
    num_layers = pool.kv.shape[0] * pool.kv.shape[1]
    scales = None if pool.kv_scales is None else pool.kv_scales.view(num_layers, 1, -1)
    return replace(pool, kv=pool.kv.view(num_layers, 1, -1), kv_scales=scales), pages * pool.kv.shape[1]


def store(
    kernels: Any, pool: PoolViews, k: torch.Tensor, v: torch.Tensor, layer: int, batch: AttentionBatch
) -> None:  # fmt: skip
    """Store K and V in `pool`, where the kernels read them."""
    if hasattr(kernels, "kv_write"):
        kernels.kv_write(k, v, layer, batch)
    else:
        store_for_gpu(pool, k, v, layer, batch)


def store_with_kernels(kernels: Any, k: torch.Tensor, v: torch.Tensor, layer: int, batch: AttentionBatch) -> None:
    """Store K and V with the kernels themselves. Each row is rotated by an angle of zero."""
    num_rows, _, head_dim = k.shape
    cos, sin = torch.ones(num_rows, head_dim // 2).to(k.device), torch.zeros(num_rows, head_dim // 2).to(k.device)
    kernels.rotate_and_store(torch.zeros(num_rows, 1, head_dim).to(k), k, v, cos, sin, layer, batch)


def store_for_gpu(pool: PoolViews, k: torch.Tensor, v: torch.Tensor, layer: int, batch: AttentionBatch) -> None:
    """Store K and V in the GPU kernels' layout, `[num_kv_heads, page_tokens, head_dim]`, without a kernel.

    Interpreted, `rotate_and_store` takes longer than the attention that a test is about. It has tests of its own.
    """
    num_kv_heads, head_dim = k.shape[1:]
    kv = pool.kv_of(num_kv_heads, head_dim)
    pages = kv.view(-1, 2, num_kv_heads, 16, head_dim)
    page, token = batch.kv_slots // 16 * kv.shape[1] + layer, batch.kv_slots % 16
    for half, rows in enumerate((k, v)):
        pages[page, half, :, token] = rows.to(kv.dtype)


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute attention for one sequence's last rows in float64."""
    group_size = spec.num_heads // spec.num_kv_heads
    k, v = (x.double().repeat_interleave(group_size, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.double(), k) * spec.scale
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    key = torch.arange(k.shape[0], device=q.device)
    position = key[k.shape[0] - q.shape[0] :, None]
    is_visible = key <= position
    if spec.sliding_window is not None:
        is_visible &= key > position - spec.sliding_window
    scores = scores.masked_fill(~is_visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, q.shape[0], 1)), -1)
    return torch.einsum("hts,shd->thd", torch.softmax(scores, -1)[..., : k.shape[0]], v)


def with_contiguous_keys(batch: AttentionBatch, *, gathers: bool, poison: int) -> AttentionBatch:
    """The batch with `contiguous` set for its sequences of several query rows, written as a loop over sequences.

    Without `gathers`, no such sequence may have a prefix.
    """
    cu_q, cu_k, pages, pairs = [0], [0], [], 0
    counts = batch.cu_q.diff().tolist()
    lengths = batch.seq_lens.tolist()
    prefills = [i for i, rows in enumerate(counts) if rows > 1]
    for i in prefills:
        first = int(batch.cu_q[i])
        cu_q += [first, first + counts[i]]
        if gathers:
            cu_k += [16 * len(pages), 16 * len(pages) + lengths[i]]
            listed = int(batch.page_starts[i])
            pages += batch.pages[listed : listed + -(-lengths[i] // 16)].tolist()
        pairs += counts[i] * lengths[i]
    num_rows = int(batch.cu_q[-1])
    cu_q.append(num_rows)
    cu_k.append(16 * len(pages))
    assert poison not in pages
    keys = ContiguousKeys(
        cu_q=torch.tensor(cu_q, dtype=torch.int32),
        cu_k=torch.tensor(cu_k if gathers else cu_q, dtype=torch.int32),
        pages=torch.tensor(pages, dtype=torch.int32) if gathers else None,
        max_q=max(counts[i] for i in prefills),
        max_k=max(lengths[i] for i in prefills),
        num_rows=num_rows,
        rows_per_key=pairs / sum(lengths[i] for i in prefills),
        has_decodes=1 in counts,
    )
    return replace(batch, contiguous=keys)
