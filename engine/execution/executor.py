"""The interface for running the engine's batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from loramux.engine.constraints.grammar import NO_MASKS, Masks
from loramux.engine.drafting.draft import Draft
from loramux.engine.execution.sampler import HeadDrafts, SampledToken
from loramux.engine.protocol.messages import PromptLogprob
from loramux.engine.sequences.batch import Batch, RepeatRows
from loramux.engine.sequences.sequence import Sequence


class StepResult(Protocol):
    def tokens(self) -> list[SampledToken]:
        """Wait for the step to finish, and return the token chosen after each sample row, in order."""
        ...

    def prompt_logprobs(self) -> list[tuple[PromptLogprob, ...]]:
        """Return the log-probabilities of the prompt tokens for each entry of `Batch.scores`. Call `tokens` first."""
        ...

    def pooled(self) -> list[npt.NDArray[np.float64]]:
        """Return the sum of the hidden states, float64 `[hidden_size]`, or the logits of the classes, float64
        `[num_labels]`, for each entry of `Batch.pooled`. Call `tokens` first.
        """
        ...

    def head_drafts(self) -> HeadDrafts | None:
        """What the base's own head has done, or None if it has not run, or on a GPU has only stored its K and V. Call
        `tokens` first.
        """
        ...

    def repeat_rows(self) -> RepeatRows | None:
        """The call that repeats rows of this step. None unless the step has drafts and the decoder is hybrid."""
        ...


class Forward(Protocol):
    """A submitted step whose tokens have not been chosen yet."""

    def choose(self, masks: Masks = NO_MASKS, unused: Collection[int] = ()) -> StepResult:
        """Start choosing a token after each sample row. Call this once, before submitting the next step.

        The caller ignores the tokens of the sample rows `unused`.
        """
        ...


class StepGivenUp(Exception):
    """The step was given up while it was computed. The K and V of its rows are undefined, and it chooses no tokens."""


class Executor(Protocol):
    """Runs batches on a device, in submission order."""

    def submit(self, batch: Batch) -> Forward:
        """Start a step. It may read tokens that the previous step has not chosen yet.

        Raises StepGivenUp, before any effect other than on the K and V of the batch's rows, if the caller no longer
        wants the step.
        """
        ...


class SubmittedStep(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A step whose tokens are not committed yet.

    `sampling[i]` receives item `i` of `result.tokens()`, unless it is None, and `scoring[i]` receives item `i` of
    `result.prompt_logprobs()`. `pooling[i]` receives item `i` of `result.pooled()`, and whether that ends its prompt.
    The tokens after a sequence's `drafts` follow the sequence's own token, and `sampling` is None there. `started_s` is
    when the step began. `num_sequences` and `num_rows` are those of a step that may have drafts, and 0 for other steps.
    `read_bytes` is the number of bytes that a decode step must read, or 0 if it is unknown, and `prompt_tokens` the
    number of prompt tokens that the step computes for the first time.
    """

    sampling: Collection[Sequence | None]
    scoring: list[Sequence]
    pooling: list[tuple[Sequence, bool]]
    result: StepResult
    drafts: Mapping[Sequence, Draft]
    started_s: float
    num_sequences: int = 0
    num_rows: int = 0
    read_bytes: int = 0
    prompt_tokens: int = 0
