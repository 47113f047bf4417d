"""Runs the base's own head at the end of a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from loramux.engine.decoder.draft_head import DraftHead
from loramux.engine.execution.sampler import HeadDrafts, SampledToken
from loramux.engine.sequences.batch import Batch, StepInputs
from loramux.kernels.dispatch import Kernels
from loramux.kernels.tables import AdapterTables


@dataclass(frozen=True, slots=True, eq=False)
class HeadRunner:
    """The head, and the kernels over its pool."""

    head: DraftHead
    kernels: Kernels

    def run(
        self,
        batch: Batch,
        inputs: StepInputs,
        states: torch.Tensor,
        sampled: Sequence[SampledToken],
        tables: AdapterTables,
    ) -> HeadDrafts | None:
        """Store the head's K and V of a step, and draft the token after each sampled one if the batch says so.

        `states` `[num_tokens, hidden_size]` is `DraftHead.states`.
        """
        assert batch.head is not None
        next_tokens = torch.from_numpy(batch.head.next_tokens).clone()
        # A row without a token has logits that are not finite, and its sequence ends.
        chosen = torch.tensor([one.token_id or 0 for one in sampled], dtype=torch.int32)
        rows = torch.from_numpy(batch.sample_rows).long()
        next_tokens[rows] = chosen
        if not batch.head.is_drafting:
            self.head.store(inputs, states, next_tokens, self.kernels, tables)
            return None
        started_s = time.perf_counter()
        logits = self.head.logits(inputs, states, next_tokens, self.kernels, tables)
        best = logits[rows].max(dim=1)
        # The maximum of a row with NaN is NaN.
        is_finite = best.values.isfinite().tolist()
        tokens = [token if finite else None for token, finite in zip(best.indices.tolist(), is_finite, strict=True)]
        return HeadDrafts(tokens, time.perf_counter() - started_s)
