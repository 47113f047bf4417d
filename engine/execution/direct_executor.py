"""The executor for CPUs: runs each batch synchronously, without padding."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from loramux.engine.adapters.slot_tables import SlotTables
from loramux.engine.architectures.model_config import HEAD
from loramux.engine.constraints.grammar import NO_MASKS, Masks
from loramux.engine.decoder.decoder import Decoder, HeadAdapters
from loramux.engine.decoder.recorded_decoder import RecordedDecoder, StartRecording
from loramux.engine.decoder.vocabularies import Vocabularies
from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.execution.executor import StepGivenUp
from loramux.engine.execution.head_drafts import HeadRunner
from loramux.engine.execution.pooled_prompts import PooledPrompts, pool_prompts
from loramux.engine.execution.prompt_scores import ScoredPrompts, score_prompts
from loramux.engine.execution.sampler import FinishedStep, HeadDrafts, SampledToken, sample
from loramux.engine.sequences.batch import (
    Batch,
    OuterSlots,
    RepeatedRows,
    RepeatRows,
    SamplingRow,
    StepInputs,
    samples_without,
)
from loramux.engine.sequences.layer_groups import LayerGroups
from loramux.kernels.dispatch import Kernels
from loramux.kernels.segments import build_segments
from loramux.kernels.tables import AttentionBatch, Segments


@dataclass(frozen=True, slots=True, eq=False)
class DirectForward:
    """A step whose logits, float32 `[num_samples, vocab_size]`, prompt scores and pooled prompts are complete.

    `run_head` runs the base's own head for drafts once the tokens are chosen. It is None without one. `repeat` is
    `StepResult.repeat_rows`.
    """

    logits: torch.Tensor
    samples: tuple[SamplingRow, ...]
    eos_token_ids: tuple[int, ...]
    scored: ScoredPrompts | None = None
    pools: PooledPrompts | None = None
    run_head: Callable[[Sequence[SampledToken]], HeadDrafts] | None = None
    repeat: RepeatRows | None = None

    def choose(self, masks: Masks = NO_MASKS, unused: Collection[int] = ()) -> FinishedStep:
        sampled = sample(self.logits, samples_without(self.samples, unused), self.eos_token_ids, masks)
        head = None if self.run_head is None else self.run_head(sampled)
        return FinishedStep(sampled, self.scored, self.pools, head, self.repeat)


@dataclass(frozen=True, slots=True, eq=False)
class _Computed:
    """The normed states of the wanted rows, and the head's product with them if it is known.

    `states` is what the head for drafts reads, of all rows, or None without such a head.
    """

    hidden: torch.Tensor
    product: torch.Tensor | None
    states: torch.Tensor | None


class DirectExecutor:
    """Runs batches through a decoder. The logits are complete when `submit` returns."""

    def __init__(
        self,
        decoder: Decoder,
        kernels: Kernels,
        tables: SlotTables,
        eos_token_ids: tuple[int, ...],
        start_recording: StartRecording | None = None,
        head: HeadRunner | None = None,
    ) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._tables = tables
        self._eos_token_ids = eos_token_ids
        self._accelerator = HostAccelerator()
        self._head = head
        self.is_unwanted: Callable[[], bool] = lambda: False
        """Called before each layer in the first half of a step. If it returns True, `submit` raises StepGivenUp."""
        self._recorded = None
        if start_recording is not None:
            self._recorded = RecordedDecoder(decoder, kernels, tables.device, start_recording)

    def submit(self, batch: Batch) -> DirectForward:
        if batch.scores or batch.pooled:
            return self._with_prompt_rows(batch)
        outer = self._tables.outer_slots(batch.slots, batch.sample_rows)
        inputs = self._inputs(batch, batch.sample_rows, outer)
        found = self._compute(batch, inputs)
        logits = self._logits_of(found.hidden, found.product, None if outer is None else outer.head)
        run_head, repeat = self._head_of(batch, inputs, found), self._repeat_of(batch, inputs)
        return DirectForward(logits, batch.samples, self._eos_token_ids, run_head=run_head, repeat=repeat)

    def logits(self, batch: Batch) -> torch.Tensor:
        """Logits of the batch's sample rows, float32 `[num_samples, vocab_size]`."""
        return self.submit(batch).logits

    def _compute(self, batch: Batch, inputs: StepInputs) -> _Computed:
        """Run the decoder. The wanted rows are `inputs.sample_rows`."""
        head = None if self._head is None or batch.head is None else self._head.head
        if self._recorded is not None and len(batch.sample_rows) == len(batch.tokens):
            found = self._recorded.run(inputs)
            if found is not None:
                total, hidden, product = found
                return _Computed(hidden, product, None if head is None else head.states(total, hidden))
        if head is None:
            hidden = self._decoder.hidden(inputs, self._kernels, self._tables.device, self._note_layer)
            return _Computed(hidden, None, None)
        total, normed = self._decoder.states(inputs, self._kernels, self._tables.device, self._note_layer)
        return _Computed(normed[inputs.sample_rows], None, head.states(total, normed))

    def _note_layer(self, layer: int) -> None:
        # In the second half, more work is lost than the rest of the step, which the new sequence would wait for.
        if 2 * layer < self._decoder.config.num_layers and self.is_unwanted():
            raise StepGivenUp

    def _head_of(
        self, batch: Batch, inputs: StepInputs, found: _Computed
    ) -> Callable[[Sequence[SampledToken]], HeadDrafts] | None:
        states, head = found.states, self._head
        if states is None or head is None:
            return None

        def run_head(sampled: Sequence[SampledToken]) -> HeadDrafts:
            started_s = time.perf_counter()
            chosen = torch.tensor([-1 if one.token_id is None else one.token_id for one in sampled], dtype=torch.int32)
            submitted = head.submit(batch, inputs, states, chosen)
            found = HeadDrafts(None, [], 0.0) if submitted is None else submitted.drafts()
            return replace(found, seconds=time.perf_counter() - started_s)

        return run_head

    def _repeat_of(self, batch: Batch, inputs: StepInputs) -> RepeatRows | None:
        delta_inputs = inputs.delta_inputs
        if delta_inputs is None:
            return None

        def repeat(repeated: list[RepeatedRows]) -> None:
            rows: list[int] = []
            for one in repeated:
                first = int(batch.sample_rows[one.begin])
                rows += range(first, first + one.num_rows)
            states = AttentionBatch(
                cu_q=_running_sum(one.num_rows for one in repeated),
                seq_lens=torch.tensor([one.seq_len for one in repeated], dtype=torch.int32),
                pages=torch.tensor([page for one in repeated for page in one.pages], dtype=torch.int32),
                page_starts=_running_sum(len(one.pages) for one in repeated)[:-1],
                kv_slots=torch.from_numpy(batch.kv_slots[0, rows]),
                max_q=max(one.num_rows for one in repeated),
            )
            self._decoder.advance_states([one[rows] for one in delta_inputs], states, self._kernels)

        return repeat

    def _with_prompt_rows(self, batch: Batch) -> DirectForward:
        """A step that also scores and pools prompt rows."""
        scored_rows, pooled_rows = batch.scored_rows, batch.pooled_rows
        rows = np.concatenate([batch.sample_rows, scored_rows, pooled_rows])
        outer = self._tables.outer_slots(batch.slots, rows)
        inputs = self._inputs(batch, rows, outer)
        found = self._compute(batch, inputs)
        hidden, num_samples = found.hidden, len(batch.sample_rows)
        num_scored = num_samples + len(scored_rows)

        def logits_of(begin: int, end: int) -> torch.Tensor:
            return self._logits_of(hidden[begin:end], None, None if outer is None else outer.head[begin:end])

        def scored_logits(begin: int, end: int) -> torch.Tensor:
            return logits_of(num_samples + begin, num_samples + end)

        scored = score_prompts(batch.scores, scored_logits, self._accelerator) if batch.scores else None
        pooled_hidden = hidden[num_scored:]

        def class_logits(chosen: list[int]) -> torch.Tensor:
            slots = batch.slots[pooled_rows[chosen]]
            max_rows, segments = self._tables.max_rows(slots, HEAD), self._segments(slots)
            head = HeadAdapters(self._kernels, self._tables.device, segments, max_rows)
            return self._decoder.class_logits(pooled_hidden[chosen], head)

        pools = None
        if batch.pooled:
            pools = pool_prompts(batch.pooled, pooled_hidden, class_logits, self._accelerator)
        return DirectForward(
            logits_of(0, num_samples),
            batch.samples,
            self._eos_token_ids,
            scored,
            pools,
            self._head_of(batch, inputs, found),
            self._repeat_of(batch, inputs),
        )

    def _logits_of(
        self, hidden: torch.Tensor, product: torch.Tensor | None, head_slots: npt.NDArray[np.int32] | None
    ) -> torch.Tensor:
        head = None
        if head_slots is not None:
            max_rows = self._tables.max_rows(head_slots, HEAD)
            sizes = self._tables.vocab_sizes(head_slots)
            vocabularies = Vocabularies.of(sizes, self._decoder.config.vocab_size, self._accelerator)
            segments = self._segments(head_slots)
            head = HeadAdapters(self._kernels, self._tables.device, segments, max_rows, vocabularies)
        return self._decoder.logits(hidden, head, product)

    def _inputs(self, batch: Batch, rows: npt.NDArray[np.int32], outer: OuterSlots | None) -> StepInputs:
        def batch_of(starts: npt.NDArray[np.int32], kv_slots: npt.NDArray[np.int64]) -> AttentionBatch:
            return AttentionBatch(
                cu_q=torch.from_numpy(batch.cu_q),
                seq_lens=torch.from_numpy(batch.seq_lens),
                pages=torch.from_numpy(batch.blocks),
                page_starts=torch.from_numpy(starts),
                kv_slots=torch.from_numpy(kv_slots),
                max_q=batch.max_q,
            )

        states = states_of(batch)
        return StepInputs(
            tokens=torch.from_numpy(batch.tokens),
            positions=torch.from_numpy(batch.positions),
            attention=tuple(map(batch_of, batch.block_starts, batch.kv_slots)),
            slots=torch.from_numpy(batch.slots),
            segments=self._segments(batch.slots),
            sample_rows=torch.from_numpy(rows),
            embedding_segments=None if outer is None else self._segments(outer.embedding),
            states=states,
            delta_inputs=[] if states is not None and len(states.seq_lens) < batch.num_sequences else None,
            groups=LayerGroups.holding(self._tables.modules(batch.slots), self._decoder.module_groups),
        )

    def _segments(self, slots: npt.NDArray[np.int32]) -> Segments:
        return build_segments(slots, self._kernels.segment_rows, max(1, self._tables.max_rank(slots)))


def states_of(batch: Batch) -> AttentionBatch | None:
    """The states of a hybrid decoder's sequences. The drafts of a sequence, whose entries follow it, are its rows."""
    if not len(batch.state_starts):
        return None
    first = np.flatnonzero(np.diff(batch.state_starts, prepend=-1))
    end = np.append(first[1:], batch.num_sequences)
    cu_q = np.append(batch.cu_q[first], batch.cu_q[-1])
    return AttentionBatch(
        cu_q=torch.from_numpy(cu_q),
        seq_lens=torch.from_numpy(batch.seq_lens[end - 1]),
        pages=torch.from_numpy(batch.blocks),
        page_starts=torch.from_numpy(batch.state_starts[first]),
        kv_slots=torch.from_numpy(batch.kv_slots[0]),
        max_q=int(np.diff(cu_q).max()),
    )


def _running_sum(counts: Iterable[int]) -> torch.Tensor:
    """`[0, counts[0], counts[0] + counts[1], ...]`, int32."""
    return torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32)
