"""Runs each batch at once, in its own size: the CPU's way."""

from __future__ import annotations

import torch

from loramux.engine.batch import Batch, StepInputs
from loramux.engine.model import Decoder
from loramux.engine.sampler import FinishedStep, sample
from loramux.engine.slot_tables import SlotTables
from loramux.kernels.dispatch import Kernels
from loramux.kernels.segments import build_segments
from loramux.kernels.tables import AttentionBatch


class DirectExecutor:
    """Runs batches through a decoder over one pool; a result is there when `submit` returns."""

    def __init__(self, decoder: Decoder, kernels: Kernels, tables: SlotTables, eos_token_ids: tuple[int, ...]) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._tables = tables
        self._eos_token_ids = eos_token_ids

    def submit(self, batch: Batch) -> FinishedStep:
        return FinishedStep(sample(self.logits(batch), batch.samples, self._eos_token_ids))

    def logits(self, batch: Batch) -> torch.Tensor:
        """The logits of the batch's sample rows, float32 `[num_samples, vocab_size]`."""
        hidden = self._decoder.hidden(self._inputs(batch), self._kernels, self._tables.device)
        return self._decoder.logits(hidden)

    def _inputs(self, batch: Batch) -> StepInputs:
        return StepInputs(
            tokens=torch.from_numpy(batch.tokens),
            positions=torch.from_numpy(batch.positions),
            attention=AttentionBatch(
                cu_q=torch.from_numpy(batch.cu_q),
                seq_lens=torch.from_numpy(batch.seq_lens),
                pages=torch.from_numpy(batch.pages),
                page_starts=torch.from_numpy(batch.page_starts),
                kv_slots=torch.from_numpy(batch.kv_slots),
                max_q=batch.max_q,
            ),
            segments=build_segments(
                batch.slots, self._kernels.segment_rows, max(1, self._tables.max_rank(batch.slots))
            ),
            sample_rows=torch.from_numpy(batch.sample_rows),
        )
