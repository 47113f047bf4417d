"""Runs the base's own head at the end of a step."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from loramux.engine.adapters.slot_tables import SlotTables
from loramux.engine.decoder.draft_head import DraftHead
from loramux.engine.device.accelerator import Accelerator, Fence
from loramux.engine.execution.sampler import HeadDrafts
from loramux.engine.execution.step_shape import rank_bucket
from loramux.engine.sequences.batch import Batch, StepInputs
from loramux.kernels.dispatch import Kernels
from loramux.kernels.tables import AdapterTables


@dataclass(slots=True, eq=False)
class SubmittedHead:
    """Drafts on their way to the host, int32 `[num_samples]`. A draft is -1 if its logits are not finite.

    On a CPU, they are complete. `from_drafters` is as in `HeadDrafts`.
    """

    tokens: torch.Tensor
    from_drafters: list[bool]
    fence: Fence
    found: HeadDrafts | None = None
    """The drafts once they have reached the host."""

    def drafts(self) -> HeadDrafts:
        """Wait for the drafts. Call this once the step's own tokens have reached the host.

        On a GPU, only this wait counts as time of the head, because the launches overlap with the step.
        """
        if self.found is None:
            started_s = time.perf_counter()
            self.fence.wait()
            tokens = [None if token < 0 else token for token in self.tokens.tolist()]
            self.found = HeadDrafts(tokens, self.from_drafters, time.perf_counter() - started_s)
        return self.found


@dataclass(frozen=True, slots=True, eq=False)
class HeadRunner:
    """Runs the head with the kernels for its pool. `slots` has the drafters of the resident adapters."""

    head: DraftHead
    kernels: Kernels
    slots: SlotTables
    accelerator: Accelerator

    @torch.inference_mode()
    def submit(
        self, batch: Batch, inputs: StepInputs, states: torch.Tensor, chosen: torch.Tensor
    ) -> SubmittedHead | None:
        """Store the head's K and V of a step, and draft the token after each chosen one if the batch says so.

        `states` `[num_tokens, hidden_size]` is `DraftHead.states`. The axes of `inputs` and `states` may be padded.
        `chosen` int32 `[num_samples]` has a negative number where the logits are not finite.
        """
        assert batch.head is not None
        padding = len(states) - len(batch.head.next_tokens)
        next_tokens = self.accelerator.stage(torch.from_numpy(np.pad(batch.head.next_tokens, (0, padding))))
        rows = inputs.sample_rows[: len(chosen)].long()
        next_tokens[rows] = chosen.clamp(min=0)
        if rank := self.slots.max_draft_rank(batch.slots):
            # On a GPU, the kernels of each bucket have been compiled.
            inputs = replace(inputs, segments=replace(inputs.segments, max_rank=rank_bucket(rank)))
        read = inputs, states, next_tokens, self.kernels, self._tables, rank > 0
        if not batch.head.is_drafting:
            self.head.store(*read)
            return None
        best = self.head.logits(*read)[rows].max(dim=1)
        # The maximum of a row with NaN is NaN.
        tokens = best.indices.masked_fill(~best.values.isfinite(), -1).int()
        on_host = self.accelerator.download(tokens)
        from_drafters = self.slots.have_drafters(batch.slots[batch.sample_rows])
        return SubmittedHead(on_host, from_drafters, self.accelerator.fence())

    @torch.inference_mode()
    def warm_up(self, inputs: StepInputs, states: torch.Tensor, *, drafts: bool) -> None:
        """Run the kernels of a shape, on padding rows only. If the shape has adapters, they may have drafters."""
        next_tokens = torch.zeros(len(states), dtype=torch.int32, device=states.device)
        run = self.head.logits if drafts else self.head.store
        run(inputs, states, next_tokens, self.kernels, self._tables, inputs.segments.num_segments > 0)

    @property
    def _tables(self) -> AdapterTables:
        tables = self.slots.device.drafter
        assert tables is not None, "a base with a head has modules for drafters"
        return tables
