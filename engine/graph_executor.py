"""Runs padded batches as captured graphs, ahead of the host: the GPU's way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from loramux.engine.accelerator import Accelerator
from loramux.engine.batch import NO_ROWS, Batch
from loramux.engine.device_sampler import DeviceSampler, SampledStep
from loramux.engine.logit_edits import logit_edits
from loramux.engine.messages import SamplingParams
from loramux.engine.model import Decoder
from loramux.engine.sampler import SamplingRow
from loramux.engine.slot_tables import SlotTables
from loramux.engine.step_buffer import StepBuffer, StepLayout
from loramux.engine.step_shape import StepShape, step_shape
from loramux.kernels.dispatch import Kernels


class GraphExecutor:
    """Submits steps to a device that works for itself, in order; results are read later.

    A step is one copy of its metadata, the decoder up to the sample rows, the logits, and the choice of tokens. The
    decoder's part of up to MAX_GRAPH_TOKENS rows is captured the second time a shape occurs: the first run, which is
    not captured, compiles and loads whatever kernels the shape needs.
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
    ) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._tables = tables
        self._accelerator = accelerator
        self._buffer = buffer
        self._sampler = sampler
        self._max_sequences = max_sequences
        self._graphs: dict[StepShape, Callable[[], None]] = {}
        self._has_run: set[StepShape] = set()
        # Where captured steps leave the normed rows that tokens are chosen after.
        largest = step_shape(max_sequences, max_sequences, max_q=2, max_rank=0)
        self._hidden = decoder.new_hidden(largest.num_sequences)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def warm_up(self, shapes: Iterable[StepShape]) -> None:
        """Run each shape with nothing but padding in it, so that no request waits for kernels to be compiled or loaded,
        and so that whatever memory the largest takes is taken now. A captured step is captured when it first occurs."""
        for shape in shapes:
            layout = self._buffer.load(NO_ROWS, shape)
            self._forward(layout)
            if shape.is_captured:
                self._has_run.add(shape)
            for params in (
                SamplingParams(temperature=0.0),
                SamplingParams(top_k=5, top_p=0.5),
                # Rows with a bias or penalties are sampled from float32, which may be kernels of their own.
                SamplingParams(top_k=5, logit_bias=((0, 1.0),)),
            ):
                row = SamplingRow(params, 0, 0, logit_edits(params, [0], 1))
                samples = [row] * min(shape.num_sequences, self._max_sequences)
                logits = self._decoder.logits(self._hidden[: len(samples)])
                self._sampler.choose(logits, samples, layout.sampling).tokens()

    def submit(self, batch: Batch) -> SampledStep:
        layout = self._buffer.load(batch, self._shape(batch))
        self._run(layout)
        num_samples = len(batch.samples)
        logits = self._decoder.logits(self._hidden[:num_samples])
        return self._sampler.choose(logits, batch.samples, layout.sampling)

    def _shape(self, batch: Batch) -> StepShape:
        has_adapters = bool((batch.slots >= 0).any())
        max_rank = max(1, self._tables.max_rank(batch.slots)) if has_adapters else 0
        return step_shape(batch.num_tokens, batch.num_sequences, batch.max_q, max_rank)

    def _run(self, layout: StepLayout) -> None:
        shape = layout.shape
        replay = self._graphs.get(shape)
        if replay is None and shape in self._has_run:
            replay = self._graphs[shape] = self._accelerator.capture(lambda: self._forward(layout))
        if replay is not None:
            replay()
            return
        self._forward(layout)
        if shape.is_captured:
            self._has_run.add(shape)

    @torch.inference_mode()
    def _forward(self, layout: StepLayout) -> None:
        inputs = replace(layout.inputs, tokens=self._sampler.resolve(layout.inputs.tokens))
        hidden = self._decoder.hidden(inputs, self._kernels, self._tables.device)
        self._hidden[: hidden.shape[0]].copy_(hidden)
