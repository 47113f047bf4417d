"""The rows of one step, as the host lays them out and as a forward pass reads them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from loramux.engine.sampler import SamplingRow
from loramux.engine.sequence import Sequence
from loramux.kernels.tables import AttentionBatch, Segments


class ScheduledSequence(NamedTuple):
    """`num_tokens` tokens of a sequence, from position `sequence.num_computed` on, run in this step."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether this chunk reaches the last token, so that the next one can be chosen."""
        return self.sequence.num_computed + self.num_tokens == self.sequence.num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One step on the host. Rows of one adapter are adjacent, because its sequences are.

    Sequence `i` has rows `[cu_q[i], cu_q[i + 1])`, at most `max_q` of them, and a context `[0, seq_lens[i])`. The K and
    V of its position `p` belong into `pages[page_starts[i] + p // page_tokens]`; `kv_slots` int64 `[num_tokens]` is
    `page * page_tokens + p % page_tokens` of each row. All other arrays are int32.

    `tokens` `[num_tokens]`: a negative entry `-1 - k` stands for the `k`-th token chosen by the step before, which
    only the device may know yet. `positions` and `slots` `[num_tokens]`: a row's position and adapter slot, -1 for the
    base. `sample_rows` `[num_samples]` are the rows after which a token is chosen, as `samples` say.
    """

    tokens: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]
    cu_q: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    pages: npt.NDArray[np.int32]
    page_starts: npt.NDArray[np.int32]
    kv_slots: npt.NDArray[np.int64]
    max_q: int
    sample_rows: npt.NDArray[np.int32]
    samples: tuple[SamplingRow, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_sequences(self) -> int:
        return len(self.seq_lens)


@dataclass(frozen=True, slots=True, eq=False)
class OuterSlots:
    """Adapter slots of a step's rows as the outer modules see them: -1 where a row's adapter lacks the module.

    `embedding` int32 `[num_tokens]`, `head` int32 `[num_samples]`.
    """

    embedding: npt.NDArray[np.int32]
    head: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """What a forward pass reads, on its device; the axes may be padded, and rows of no sequence mean nothing.

    `tokens`, `positions` and `sample_rows` int32. `segments` without entries switches the adapters off, and so do
    `embedding_segments`, those of the rows whose adapters change the embedding; None is none.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    segments: Segments
    sample_rows: torch.Tensor
    embedding_segments: Segments | None = None


def _no_rows() -> Batch:
    none = np.zeros(0, np.int32)
    return Batch(
        tokens=none,
        positions=none,
        slots=none,
        cu_q=np.zeros(1, np.int32),
        seq_lens=none,
        pages=none,
        page_starts=none,
        kv_slots=none.astype(np.int64),
        max_q=0,
        sample_rows=none,
        samples=(),
    )


NO_ROWS = _no_rows()
"""A step without a sequence: in a padded shape, all of it is padding."""


def build_batch(scheduled: list[ScheduledSequence], page_tokens: int) -> Batch:
    """Lay the scheduled sequences one after another."""
    counts, starts, slots, num_pages, tokens = [], [], [], [], []
    pages = array("i")
    sampling: list[int] = []
    samples: list[SamplingRow] = []
    for row, (sequence, num_tokens) in enumerate(scheduled):
        begin = sequence.num_computed
        end = begin + num_tokens
        counts.append(num_tokens)
        starts.append(begin)
        slots.append(sequence.slot)
        num_pages.append(len(sequence.pages))
        pages.extend(sequence.pages)
        tokens += sequence.tokens[begin:end]
        if end > len(sequence.tokens):
            assert end == len(sequence.tokens) + 1, "only the newest token of a sequence can be in flight"
            tokens.append(-1 - sequence.sample_index)
        if end == sequence.num_tokens:
            sampling.append(row)
            samples.append(sampling_row(sequence))
    per_sequence = np.array((counts, starts, slots), np.int32)
    of_row = np.repeat(np.arange(len(scheduled)), counts)
    begins, row_slots = per_sequence[1:, of_row]
    cu_q, page_starts = _running_sum(counts), _running_sum(num_pages)
    positions = np.arange(len(tokens), dtype=np.int32) - cu_q[of_row] + begins
    page_ids = np.frombuffer(pages, np.int32)
    page_of_row = page_ids[page_starts[of_row] + positions // page_tokens].astype(np.int64)
    return Batch(
        tokens=np.array(tokens, np.int32),
        positions=positions,
        slots=row_slots,
        cu_q=cu_q,
        seq_lens=per_sequence[0] + per_sequence[1],
        pages=page_ids,
        page_starts=page_starts[:-1],
        kv_slots=page_of_row * page_tokens + positions % page_tokens,
        max_q=max(counts),
        sample_rows=cu_q[1:][sampling] - 1,
        samples=tuple(samples),
    )


def sampling_row(sequence: Sequence) -> SamplingRow:
    """What decides the next token of a sequence, fixed now: later steps may change the sequence."""
    return SamplingRow(sequence.add.sampling, sequence.seed, sequence.num_chosen, sequence.edits)


def _running_sum(counts: list[int]) -> npt.NDArray[np.int32]:
    """`[0, counts[0], counts[0] + counts[1], ...]`."""
    sums = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums
