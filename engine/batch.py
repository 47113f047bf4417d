"""The tensors of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from loramux.engine.sequence import Sequence
from loramux.kernels.tables import AttentionBatch


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """`num_tokens` tokens of a sequence, from position `sequence.num_computed` on, run in this step."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether this chunk reaches the last token, so that the next one can be chosen."""
        return self.sequence.num_computed + self.num_tokens == self.sequence.num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """What a forward pass reads. Rows of one adapter are adjacent, because its sequences are.

    `tokens` and `positions` int64 `[num_tokens]`; `slots` int32 `[num_tokens]` is each row's adapter slot, -1 for the
    base; `sample_rows` int64 `[num_samples]` are the rows whose logits are wanted.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: npt.NDArray[np.int32]
    attention: AttentionBatch
    sample_rows: torch.Tensor


def build_batch(scheduled: list[ScheduledSequence], page_tokens: int) -> Batch:
    """Lay the scheduled sequences one after another."""
    counts = np.array([item.num_tokens for item in scheduled], np.int32)
    cu_q = np.zeros(len(scheduled) + 1, np.int32)
    np.cumsum(counts, out=cu_q[1:])
    starts = np.array([item.sequence.num_computed for item in scheduled], np.int64)
    seq_lens = (starts + counts).astype(np.int32)
    max_pages = max(len(item.sequence.pages) for item in scheduled)
    page_table = np.zeros((len(scheduled), max_pages), np.int32)
    tokens: list[int] = []
    for row, item in enumerate(scheduled):
        sequence = item.sequence
        page_table[row, : len(sequence.pages)] = sequence.pages
        tokens.extend(sequence.tokens[sequence.num_computed : sequence.num_computed + item.num_tokens])
    of_row = np.repeat(np.arange(len(scheduled)), counts)
    positions = np.arange(cu_q[-1], dtype=np.int64) - cu_q[of_row] + starts[of_row]
    pages = page_table[of_row, positions // page_tokens].astype(np.int64)
    slots = np.array([item.sequence.slot for item in scheduled], np.int32)[of_row]
    sample_rows = np.array([cu_q[row + 1] - 1 for row, item in enumerate(scheduled) if item.samples], np.int64)
    return Batch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.from_numpy(positions),
        slots=slots,
        attention=AttentionBatch(
            cu_q=torch.from_numpy(cu_q),
            seq_lens=torch.from_numpy(seq_lens),
            page_table=torch.from_numpy(page_table),
            kv_slots=torch.from_numpy(pages * page_tokens + positions % page_tokens),
        ),
        sample_rows=torch.from_numpy(sample_rows),
    )
