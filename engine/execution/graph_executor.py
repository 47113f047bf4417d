"""The executor for GPUs: pads batches, and replays captured graphs without waiting for results."""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from loramux.engine.adapters.slot_tables import SlotTables
from loramux.engine.architectures.model_config import HEAD
from loramux.engine.constraints.grammar import NO_MASKS, Masks
from loramux.engine.constraints.logit_penalties import logit_penalties
from loramux.engine.decoder.decoder import Decoder, HeadAdapters
from loramux.engine.decoder.vocabularies import Vocabularies
from loramux.engine.device.accelerator import Accelerator
from loramux.engine.device.device_faults import reason_of
from loramux.engine.drafting.speculation import MAX_ROWS
from loramux.engine.execution.contiguous_keys import contiguous_keys, padding_keys
from loramux.engine.execution.device_sampler import DeviceSampler, SampledStep
from loramux.engine.execution.head_drafts import HeadRunner, SubmittedHead
from loramux.engine.execution.pooled_prompts import PooledPrompts, pool_prompts
from loramux.engine.execution.prompt_scores import ScoredPrompts, score_prompts
from loramux.engine.execution.step_buffer import SamplingInputs, StepBuffer, StepLayout
from loramux.engine.execution.step_shape import MAX_SINGLE_ROWS, StepShape, step_shape
from loramux.engine.protocol.messages import GraphMemory, SamplingParams
from loramux.engine.sequences.batch import NO_ROWS, Batch, OuterSlots, SamplingRow, StepInputs, samples_without
from loramux.engine.sequences.layer_groups import ALL_GROUPS, LayerGroups
from loramux.kernels.dispatch import Kernels
from loramux.kernels.segments import SEGMENT_ROWS, group_rows
from loramux.kernels.tables import Segments

MAX_GRAPHS = 240
"""Maximum number of captured graphs. Decodes of up to 256 sequences, with and without adapters, need 124."""

STEPS_BEFORE_CAPTURE = 8
"""Number of steps of a shape before its graph is captured. Capturing takes about 100 ms, in which no request makes
progress, and a graph saves several milliseconds of launching per step.
"""

STEPS_BEFORE_OWN_GRAPH = 256
"""The same number for a shape whose steps can replay the graph of the shape with all groups instead. Its own graph
saves only the launches for groups without adapters, a few tenths of a millisecond.
"""

HEAD_SEGMENTS = (1, 4, 16, 64, 256)
"""Segment counts that the head's kernels are compiled for. Padding is costly, because the grids span the vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class GraphForward:
    """A submitted step. The device writes its logits to `logits` `[num_samples, vocab_size]`.

    `submit_head` runs the base's own head for drafts once the tokens are chosen. It is None without one.
    """

    sampler: DeviceSampler
    logits: torch.Tensor
    samples: tuple[SamplingRow, ...]
    inputs: SamplingInputs
    scored: ScoredPrompts | None = None
    pools: PooledPrompts | None = None
    submit_head: Callable[[], SubmittedHead | None] | None = None

    def choose(self, masks: Masks = NO_MASKS, unused: Collection[int] = ()) -> SampledStep:
        samples = samples_without(self.samples, unused)
        chosen = self.sampler.choose(self.logits, samples, self.inputs, masks)
        self.sampler.share(len(samples))
        if self.scored is None and self.pools is None and self.submit_head is None:
            return chosen
        head = None if self.submit_head is None else self.submit_head()
        return replace(chosen, scored=self.scored, pools=self.pools, head=head)


class GraphExecutor:
    """Submits steps to an asynchronous device in order, and reads their results later.

    A step copies its metadata to the device in one transfer, runs the decoder, computes the logits of the sample rows,
    and samples. For up to MAX_GRAPH_TOKENS rows, the decoder part is captured once its shape has occurred
    STEPS_BEFORE_CAPTURE times. The first run is never captured, because it compiles and loads the kernels that the
    shape needs. Beyond `max_graphs`, the least recently replayed graph is dropped, and its shape must occur as often
    again. A shape whose capture fails always runs uncaptured. With `must_capture`, such a failure is raised instead,
    because several workers must capture the same shapes.

    Batches with adapters that modify the embedding, the head or norms have separate shapes, so that other batches do
    not launch the extra kernels.

    Batches whose adapters modify only some module groups of a layer also have separate shapes. Such a batch replays the
    graph of the shape with all groups, if there is one, until its own shape has occurred STEPS_BEFORE_OWN_GRAPH times.
    Once there are `max_graphs` graphs, it always does. Otherwise, shapes that differ only in groups would evict each
    other's graphs.
    """

    def __init__(
        self,
        decoder: Decoder,
        kernels: Kernels,
        tables: SlotTables,
        accelerator: Accelerator,
        buffer: StepBuffer,
        sampler: DeviceSampler,
        max_sequences: int,
        max_graphs: int = MAX_GRAPHS,
        head: HeadRunner | None = None,
        must_capture: bool = False,
    ) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._tables = tables
        self._accelerator = accelerator
        self._buffer = buffer
        self._sampler = sampler
        self._max_sequences = max_sequences
        self._max_graphs = max_graphs
        self._must_capture = must_capture
        # Least recently replayed first.
        self._graphs: OrderedDict[StepShape, Callable[[], None]] = OrderedDict()
        self._has_run: set[StepShape] = set()
        # Number of steps of each shape that ran without a graph of their own.
        self._num_steps: Counter[StepShape] = Counter()
        self._graph_bytes = 0
        # Shapes whose capture failed. The capture is not retried.
        self._uncapturable: set[StepShape] = set()
        # Each step writes the hidden states of its sample rows here, after the final norm.
        largest = step_shape(max_sequences, max_sequences, max_q=2, max_rank=0)
        self._hidden = decoder.new_hidden(largest.num_sequences)
        self._head_runner = head
        # With a head for drafts, each step writes what the head reads of its rows here.
        self._states = None if head is None else decoder.new_hidden(buffer.max_tokens)
        # 0 if no layer reads contiguous K and V.
        most_pages = max(map(kernels.max_gathered_pages, decoder.shapes.attention), default=0)
        self._max_gathered_pages = min(most_pages, buffer.max_listed_blocks)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def graph_memory(self) -> GraphMemory:
        return GraphMemory(num_graphs=self.num_graphs, num_bytes=self._graph_bytes)

    def warm_up(self, shapes: Iterable[StepShape], captures: bool = True) -> None:
        """Run each shape with only padding, so that no request waits for kernels to be compiled or loaded.

        This also allocates the memory for the largest shape. With `captures`, decodes without outer modules are
        captured now. Other steps of up to MAX_GRAPH_TOKENS rows are captured once they have occurred often enough.
        """
        for shape in shapes:
            layout = self._buffer.load(NO_ROWS, shape)
            self._forward(layout)
            if self._head_runner is not None and self._states is not None:
                is_drafting = shape.is_decode and shape.num_sequences <= MAX_ROWS
                self._head_runner.warm_up(layout.inputs, self._states[: shape.num_tokens], drafts=is_drafting)
            if shape.is_captured:
                self._has_run.add(shape)
            elif not shape.max_rank:
                self._warm_up_contiguous_keys(layout)
            if captures and shape.is_decode:
                self._capture(layout)
            if shape.max_rank:
                self._warm_up_norms(layout)
                self._warm_up_outer(replace(shape, has_outer=True))
            num_samples = min(shape.num_sequences, self._max_sequences)
            self._warm_up_sampling(layout, self._decoder.logits(self._hidden[:num_samples]))

    def _warm_up_contiguous_keys(self, layout: StepLayout) -> None:
        """Run the kernels of prefills over contiguous K and V, with as many gathered pages as a step may have."""
        if not self._max_gathered_pages:
            return
        for num_pages in (0, self._max_gathered_pages):
            keys = padding_keys(num_pages, self._accelerator.device)
            self._forward(layout.with_contiguous_keys([keys] * len(layout.inputs.attention)))

    def _warm_up_sampling(self, layout: StepLayout, logits: torch.Tensor) -> None:
        for params in (
            SamplingParams(temperature=0.0),
            SamplingParams(top_k=5, top_p=0.5),
            # Rows with a bias or penalties are sampled from float32 logits, which may require different kernels.
            SamplingParams(top_k=5, logit_bias=((0, 1.0),)),
        ):
            row = SamplingRow(params, 0, 0, logit_penalties(params, [0], 1))
            self._sampler.choose(logits.clone(), [row] * len(logits), layout.sampling).tokens()

    def _warm_up_norms(self, layout: StepLayout) -> None:
        """Run the kernels that adapters with norms add to a shape. The same shape without norms has already run."""
        self._decoder.launch_norms(layout.inputs, self._kernels, self._tables.device)
        if layout.shape.is_captured:
            self._has_run.add(replace(layout.shape, groups=ALL_GROUPS | LayerGroups.NORMS))

    def submit(self, batch: Batch) -> GraphForward:
        outer = self._tables.outer_slots(batch.slots, batch.sample_rows)
        layout = self._buffer.load(batch, self._kept_shape(self._shape(batch, has_outer=outer is not None)), outer)
        if not layout.shape.is_captured and self._max_gathered_pages:
            groups, stage = self._decoder.cache_layout.groups, self._accelerator.stage
            layout = layout.with_contiguous_keys(contiguous_keys(batch, groups, self._max_gathered_pages, stage))
        scored = pools = None
        if batch.scores or batch.pooled:
            scored, pools = self._run_with_prompt_rows(layout, batch)
        else:
            self._run(layout)
        num_samples = len(batch.sample_rows)
        head = None if outer is None else self._head(layout, outer)
        logits = self._decoder.logits(self._hidden[:num_samples], head)
        if len(batch.samples) < num_samples:
            # Another worker samples.
            self._sampler.share(num_samples)
        submit_head = self._submit_head(batch, layout)
        return GraphForward(self._sampler, logits, batch.samples, layout.sampling, scored, pools, submit_head)

    def _submit_head(self, batch: Batch, layout: StepLayout) -> Callable[[], SubmittedHead | None] | None:
        """The call that runs the head for drafts after this step's tokens have been chosen, before the next step."""
        head, states = self._head_runner, self._states
        if head is None or states is None or batch.head is None:
            return None
        own = states[: layout.shape.num_tokens]
        return lambda: head.submit(batch, layout.inputs, own, self._sampler.chosen(len(batch.samples)))

    def _shape(self, batch: Batch, has_outer: bool) -> StepShape:
        used = batch.slots[batch.slots >= 0]
        if not used.size:
            return step_shape(batch.num_tokens, batch.num_sequences, batch.max_q, max_rank=0)
        max_rank = max(1, self._tables.max_rank(batch.slots))
        groups = LayerGroups.holding(self._tables.modules(batch.slots), self._decoder.module_groups)
        return step_shape(
            batch.num_tokens,
            batch.num_sequences,
            batch.max_q,
            max_rank,
            has_outer,
            groups,
            has_single_rows=used.size <= MAX_SINGLE_ROWS * np.unique(used).size,
            has_affines=self._tables.has_affines(used),
        )

    def _kept_shape(self, shape: StepShape) -> StepShape:
        """Return the shape that a batch of this shape runs in: itself, or the shape with all groups.

        See the class.
        """
        whole = shape.with_all_groups
        if not shape.is_captured or shape in self._graphs or shape == whole:
            return shape
        if len(self._graphs) >= self._max_graphs:
            return whole
        if whole in self._graphs and self._num_steps[shape] < STEPS_BEFORE_OWN_GRAPH:
            self._num_steps[shape] += 1
            return whole
        return shape

    def _head(self, layout: StepLayout, outer: OuterSlots) -> HeadAdapters | None:
        """Inputs for the head's adapters. The head is not captured, so its grid can depend on the batch."""
        num_segments = len(group_rows(outer.head, SEGMENT_ROWS)[2])
        if not num_segments:
            return None
        head = self._head_of(layout, num_segments, self._tables.max_rows(outer.head, HEAD))
        return replace(head, vocabularies=self._vocabularies(outer.head))

    def _vocabularies(self, head_slots: npt.NDArray[np.int32]) -> Vocabularies | None:
        sizes = self._tables.vocab_sizes(head_slots)
        return Vocabularies.of(sizes, self._decoder.config.vocab_size, self._accelerator)

    def _head_of(self, layout: StepLayout, num_segments: int, max_rows: int) -> HeadAdapters:
        whole = layout.head_segments
        assert whole is not None
        count = min(whole.num_segments, next((size for size in HEAD_SEGMENTS if size >= num_segments), num_segments))
        segments = Segments(whole.rows, whole.starts[: count + 1], whole.slots[:count], whole.max_rank)
        return HeadAdapters(self._kernels, self._tables.device, segments, max_rows)

    def _warm_up_outer(self, shape: StepShape) -> None:
        """Run the kernels that outer modules add to a shape. The same shape without outer modules has already run."""
        nobody = OuterSlots(np.zeros(0, np.int32), np.zeros(0, np.int32))
        layout = self._buffer.load(NO_ROWS, shape, nobody)
        self._decoder.embed(layout.inputs, self._kernels, self._tables.device)
        # Kernels are compiled separately for batches with fewer rows than segments and for all other batches.
        for num_rows in {1, min(shape.num_sequences, self._max_sequences)}:
            for num_segments in HEAD_SEGMENTS:
                # The same program serves any number of trained rows.
                self._decoder.logits(self._hidden[:num_rows], self._head_of(layout, num_segments, max_rows=1))
            # Logits with columns for added tokens are sampled by separate programs.
            base_size = self._decoder.config.vocab_size
            sizes = np.full(num_rows, base_size + 1, np.int32)
            vocabularies = Vocabularies.of(sizes, base_size, self._accelerator)
            head = replace(self._head_of(layout, 1, max_rows=1), vocabularies=vocabularies)
            self._warm_up_sampling(layout, self._decoder.logits(self._hidden[:num_rows], head))
        if shape.is_captured:
            self._has_run.add(shape)

    @torch.inference_mode()
    def _run_with_prompt_rows(
        self, layout: StepLayout, batch: Batch
    ) -> tuple[ScoredPrompts | None, PooledPrompts | None]:
        """Run a step, and score and pool its prompt rows. No graph is used, because a graph's output does not include
        these rows.
        """
        scored_rows, pooled_rows = batch.scored_rows, batch.pooled_rows
        prompt_rows = torch.from_numpy(np.concatenate([scored_rows, pooled_rows]))
        rows = torch.cat([layout.inputs.sample_rows, self._accelerator.stage(prompt_rows)])
        inputs = replace(layout.inputs, tokens=self._sampler.resolve(layout.inputs.tokens), sample_rows=rows)
        hidden = self._run_decoder(inputs)
        num_sequences = len(layout.inputs.sample_rows)
        self._hidden[:num_sequences].copy_(hidden[:num_sequences])
        outer = self._tables.outer_slots(batch.slots, scored_rows)

        def logits_of(begin: int, end: int) -> torch.Tensor:
            head = None if outer is None else self._scored_head(outer.head[begin:end], layout.shape.max_rank)
            return self._decoder.logits(hidden[num_sequences + begin : num_sequences + end], head)

        pooled_hidden = hidden[num_sequences + len(scored_rows) :]

        def class_logits(chosen: list[int]) -> torch.Tensor:
            head = self._scored_head(batch.slots[pooled_rows[chosen]], layout.shape.max_rank)
            assert head is not None, "every row has a classifier"
            return self._decoder.class_logits(pooled_hidden[chosen], head)

        pools = None
        if batch.pooled:
            pools = pool_prompts(batch.pooled, pooled_hidden, class_logits, self._accelerator)
        return score_prompts(batch.scores, logits_of, self._accelerator) if batch.scores else None, pools

    def _scored_head(self, slots: npt.NDArray[np.int32], max_rank: int) -> HeadAdapters | None:
        """Inputs for the head's adapters, for scored or classified rows. `slots` is as in `OuterSlots.head`."""
        rows, starts, segment_slots = group_rows(slots, SEGMENT_ROWS)
        if not len(segment_slots):
            return None
        num_segments = len(segment_slots)
        padding = next((size for size in HEAD_SEGMENTS if size >= num_segments), num_segments) - num_segments
        starts = np.pad(starts, (0, padding), constant_values=len(rows))
        segment_slots = np.pad(segment_slots, (0, padding), constant_values=-1)
        stage = self._accelerator.stage
        on_device = [stage(torch.from_numpy(one)) for one in (rows, starts, segment_slots)]
        segments = Segments(on_device[0], on_device[1], on_device[2], max_rank)
        max_rows = self._tables.max_rows(slots, HEAD)
        return HeadAdapters(self._kernels, self._tables.device, segments, max_rows, self._vocabularies(slots))

    def _run(self, layout: StepLayout) -> None:
        shape = layout.shape
        replay = self._graphs.get(shape)
        has_run = shape in self._has_run or shape.with_all_groups in self._has_run
        if replay is None and shape.is_captured and shape not in self._uncapturable:
            self._num_steps[shape] += 1
            if has_run and self._num_steps[shape] >= STEPS_BEFORE_CAPTURE:
                replay = self._capture(layout)
        if replay is not None:
            self._graphs.move_to_end(shape)
            replay()
            return
        self._forward(layout)
        if shape.is_captured:
            self._has_run.add(shape)

    def _capture(self, layout: StepLayout) -> Callable[[], None] | None:
        """Capture the shape's graph. If the capture fails, report it on standard error and return None, or raise
        RuntimeError if graphs are required.
        """
        free_bytes = self._free_bytes()
        try:
            replay = self._accelerator.capture(lambda: self._forward(layout))
        except RuntimeError as error:
            if self._must_capture:
                raise
            print(f"{layout.shape} runs without a graph; capturing it failed: {reason_of(error)}", file=sys.stderr)
            self._uncapturable.add(layout.shape)
            return None
        self._graphs[layout.shape] = replay
        if len(self._graphs) > self._max_graphs:
            # An earlier step may still be replaying this graph.
            self._accelerator.fence().wait()
            dropped, _ = self._graphs.popitem(last=False)
            # Otherwise, shapes that take turns would be captured at each of their steps.
            del self._num_steps[dropped]
        self._graph_bytes += free_bytes - self._free_bytes()
        return replay

    def _free_bytes(self) -> int:
        """Amount of free device memory in bytes, or 0 if the device uses the host's memory."""
        memory = self._accelerator.memory()
        return 0 if memory is None else memory.free

    @torch.inference_mode()
    def _forward(self, layout: StepLayout) -> None:
        inputs = replace(layout.inputs, tokens=self._sampler.resolve(layout.inputs.tokens))
        hidden = self._run_decoder(inputs)
        self._hidden[: hidden.shape[0]].copy_(hidden)

    def _run_decoder(self, inputs: StepInputs) -> torch.Tensor:
        """The output of `Decoder.hidden`. Also keeps what the head for drafts reads."""
        if self._head_runner is None or self._states is None:
            return self._decoder.hidden(inputs, self._kernels, self._tables.device)
        total, normed = self._decoder.states(inputs, self._kernels, self._tables.device)
        self._states[: total.shape[0]].copy_(self._head_runner.head.states(total, normed))
        return normed[inputs.sample_rows]
