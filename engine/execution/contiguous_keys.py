"""Finds the K and V of a step's prefills in contiguous rows, from the host's description of the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from loramux.engine.sequences.batch import Batch
from loramux.engine.sequences.cache_groups import CacheGroup
from loramux.kernels.tables import ContiguousKeys


def contiguous_keys(
    batch: Batch, groups: Sequence[CacheGroup], max_pages: int, stage: Callable[[torch.Tensor], torch.Tensor]
) -> list[ContiguousKeys | None]:
    """An entry for each group of layers. It is None if the step has no prefill, or if the group's layers have to read
    pages: because the contexts of the prefills have more than `max_pages` pages, or because the pages before a window
    are not listed.

    `stage` copies a tensor to the device.
    """
    counts = np.diff(batch.cu_q)
    (prefills,) = np.nonzero(counts > 1)
    if not prefills.size:
        return [None] * len(groups)
    rows, lengths = counts[prefills], batch.seq_lens[prefills]
    first_rows = batch.cu_q[prefills]
    cu_q = _ranges(first_rows, rows, batch.num_tokens)

    def keys(cu_k: torch.Tensor, pages: torch.Tensor | None, rows_per_key: float) -> ContiguousKeys:
        return ContiguousKeys(
            cu_q=cu_q_on_device,
            cu_k=cu_k,
            pages=pages,
            max_q=int(rows.max()),
            max_k=int(lengths.max()),
            num_rows=batch.num_tokens,
            rows_per_key=rows_per_key,
            has_decodes=bool((counts == 1).any()),
        )

    # The sizes of contexts do not matter, because nothing is gathered.
    if (rows == lengths).all():
        cu_q_on_device = stage(torch.from_numpy(cu_q))
        return [keys(cu_q_on_device, None, 0.0)] * len(groups)
    block_tokens = groups[0].block_tokens
    num_blocks = -(-lengths // block_tokens)
    total = int(num_blocks.sum())
    if total > max_pages or all(group.window is not None for group in groups):
        return [None] * len(groups)
    cu_q_on_device = stage(torch.from_numpy(cu_q))
    first_blocks = np.cumsum(num_blocks) - num_blocks
    cu_k = stage(torch.from_numpy(_ranges(first_blocks * block_tokens, lengths, total * block_tokens)))
    rows_per_key = float((rows.astype(np.int64) * lengths).sum() / lengths.sum())
    within = np.arange(total) - np.repeat(first_blocks, num_blocks)
    found: list[ContiguousKeys | None] = []
    for group, starts in zip(groups, batch.block_starts, strict=True):
        if group.window is not None:
            found.append(None)
            continue
        blocks = batch.blocks[np.repeat(starts[prefills], num_blocks) + within]
        found.append(keys(cu_k, stage(torch.from_numpy(blocks)), rows_per_key))
    return found


def _ranges(first: np.ndarray, sizes: np.ndarray, end: int) -> np.ndarray:
    """The bounds of ranges that alternate between what lies before a prefill and a prefill, int32."""
    return np.concatenate([[0], np.stack([first, first + sizes], 1).ravel(), [end]]).astype(np.int32)


def padding_keys(num_pages: int, device: torch.device) -> ContiguousKeys:
    """A prefill without rows, whose K and V are `num_pages` copies of page 0, or the step's own without any."""
    nothing = torch.zeros(4, dtype=torch.int32, device=device)
    pages = torch.zeros(num_pages, dtype=torch.int32, device=device) if num_pages else None
    return ContiguousKeys(
        cu_q=nothing,
        cu_k=nothing,
        pages=pages,
        max_q=2,
        max_k=2,
        num_rows=0,
        rows_per_key=float("inf"),
        has_decodes=True,
    )
