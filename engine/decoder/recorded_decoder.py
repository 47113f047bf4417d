"""A decoder whose decode steps of a few rows run as programs, which take much less time than calls of each kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import torch

from loramux.engine.decoder.decoder import Decoder, activation_of
from loramux.engine.decoder.layers import Residual
from loramux.engine.sequences.batch import StepInputs
from loramux.kernels.dispatch import Kernels
from loramux.kernels.recording import NotRecordable, Program, Recorder
from loramux.kernels.tables import AdapterTables, AttentionBatch

MAX_ROWS = 32
"""Maximum number of rows of a recorded step. With more rows, calling each kernel adds little to a step."""

MAX_PROGRAMS = 256
"""Maximum number of programs. Their arguments take about 100 KB for a decoder of 30 layers."""

StartRecording = Callable[[int, tuple[AttentionBatch, ...]], Recorder]
"""Begins a recording of a number of rows."""


@dataclass(frozen=True, slots=True, eq=False)
class _RecordedStep:
    """A program, the tensors that it reads, and those that it writes: `hidden` and its product with the head.

    The program reads embeddings from `total`, and leaves the output of the last layer there.
    """

    program: Program
    total: torch.Tensor
    angles: list[tuple[torch.Tensor, torch.Tensor]]
    hidden: torch.Tensor
    product: torch.Tensor


class RecordedDecoder:
    """Runs steps in which every sequence has one row. A program is recorded for each number of rows, and for each set
    of modules that the step's adapters modify.
    """

    def __init__(self, decoder: Decoder, kernels: Kernels, tables: AdapterTables, start: StartRecording) -> None:
        self._decoder, self._kernels, self._tables, self._start = decoder, kernels, tables, start
        self._steps: dict[tuple[int, int], _RecordedStep | None] = {}

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """The output of `Decoder.states` for all rows, and the head's product with the normed states.

        None if the step cannot be recorded. The next step overwrites the results.
        """
        num_rows = inputs.tokens.shape[0]
        if num_rows > MAX_ROWS or inputs.attention[0].max_q != 1:
            return None
        key = num_rows, int(inputs.groups) if inputs.segments.num_segments else 0
        if key not in self._steps:
            if len(self._steps) == MAX_PROGRAMS:
                self._steps.clear()
            self._steps[key] = self._record(inputs)
        step = self._steps[key]
        if step is None:
            return None
        step.total.copy_(self._decoder.embed(inputs, self._kernels, self._tables))
        self._decoder.angles(inputs.positions, step.angles)
        step.program.run(inputs.attention, inputs.segments)
        return step.total, step.hidden, step.product

    def _record(self, inputs: StepInputs) -> _RecordedStep | None:
        decoder, num_rows = self._decoder, inputs.tokens.shape[0]
        residual, first = decoder.begin(inputs, self._kernels, self._tables)
        is_known = first.query_scale is None and first.layer_inputs is None and first.states is None
        if residual.streams is not None or not is_known:
            return None
        recorder = self._start(num_rows, inputs.attention)
        kernels = cast(Kernels, recorder)
        step = replace(first, activate=activation_of(decoder.config, kernels))
        try:
            with recorder.recording():
                hidden = decoder.run_layers(
                    Residual(residual.total), step, inputs, slice(None), kernels, self._tables, recorder.begin_layer
                )
                product = recorder.multiply(decoder.head, hidden)
        except NotRecordable:
            return None
        return _RecordedStep(recorder.finish(), residual.total, first.angles, hidden, product)
