"""Logit bias and penalties on earlier tokens, applied to a request's logits before sampling."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence

import numpy as np
import torch

from loramux.engine.protocol.messages import SamplingParams

LARGEST = 1e30
"""Largest magnitude of an edited logit. It is finite, so that an extreme setting is not mistaken for a broken model."""


class TokenMarks:
    """The distinct tokens of a sequence, each with the mark `2 * (times generated) + (1 if in the prompt)`."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._ids = array("q", self._places)
        self._marks = array("i", [1]) * len(self._places)

    def add(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._marks.append(0)
        self._marks[place] += 2

    def copied(self) -> TokenMarks:
        marks = TokenMarks(())
        marks._places, marks._ids, marks._marks = self._places.copy(), self._ids[:], self._marks[:]
        return marks

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the ids (int64) and their marks (int32), `[num_distinct]` each."""
        return torch.from_numpy(np.array(self._ids)), torch.from_numpy(np.array(self._marks))


class LogitPenalties:
    """One sequence's bias and penalties. Each sequence has its own object, so the object also identifies the sequence.

    `tokens` is the sequence's own list, prompt first, which grows as tokens are committed. `bias_ids` int64 and `bias`
    float32 `[num_biased]`. `penalties` float32 `[3, 1]` are the repetition, presence and frequency penalties.
    """

    def __init__(self, params: SamplingParams, tokens: list[int], num_prompt: int) -> None:
        self._tokens = tokens
        self._num_prompt = num_prompt
        self.bias_ids = torch.tensor([token_id for token_id, _ in params.logit_bias], dtype=torch.int64)
        self.bias = torch.tensor([value for _, value in params.logit_bias], dtype=torch.float32)
        self.has_penalties = params.has_penalties
        self.penalties = torch.tensor(
            [[params.repetition_penalty], [params.presence_penalty], [params.frequency_penalty]], dtype=torch.float32
        )
        self._marks: TokenMarks | None = None
        self._num_marked = 0

    def marks(self, num_chosen: int) -> TokenMarks:
        """The marks for the prompt and the first `num_chosen` new tokens, which must already be committed or noted."""
        if self._marks is None or self._num_marked > num_chosen:
            self._marks = TokenMarks(self._tokens[: self._num_prompt])
            self._num_marked = 0
        for token_id in self._tokens[self._num_prompt + self._num_marked : self._num_prompt + num_chosen]:
            self._note(token_id)
        assert self._num_marked == num_chosen, "a token in flight was not noted when it was chosen"
        return self._marks

    def note(self, token_id: int, num_chosen: int) -> None:
        """Mark the token that the host chose after the first `num_chosen` tokens. It need not be committed yet."""
        if self.has_penalties and self._num_marked == num_chosen:
            self._note(token_id)

    def after(self, drafts: Sequence[int]) -> LogitPenalties:
        """A copy for the token after `drafts`, as if these followed the committed tokens."""
        marks = self.marks(len(self._tokens) - self._num_prompt).copied() if self.has_penalties else None
        other = copy.copy(self)
        other._tokens, other._marks = [*self._tokens, *drafts], marks
        return other

    def apply(self, logits: torch.Tensor, num_chosen: int) -> None:
        """Edit one row on the host, float32 `[vocab_size]`, in time proportional to the number of affected tokens."""
        if len(self.bias):
            values = logits[self.bias_ids]
            logits[self.bias_ids] = kept_finite(values + self.bias, values)
        if self.has_penalties:
            ids, marks = self.marks(num_chosen).tensors()
            values = logits[ids]
            logits[ids] = kept_finite(penalised(values, marks, *self.penalties), values)

    def _note(self, token_id: int) -> None:
        assert self._marks is not None
        self._marks.add(token_id)
        self._num_marked += 1


def logit_penalties(params: SamplingParams, tokens: list[int], num_prompt: int) -> LogitPenalties | None:
    """Return a sequence's bias and penalties, or None if its settings request neither."""
    return LogitPenalties(params, tokens, num_prompt) if params.logit_bias or params.has_penalties else None


def penalised(
    logits: torch.Tensor,
    marks: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Apply penalties as defined by vLLM and, except for the repetition penalty, by the OpenAI API.

    If a token has been generated `times` times:

        x = logit / repetition if logit > 0 else logit * repetition     (tokens of the prompt or the answer)
        x - frequency * times - presence * (times > 0)

    `logits` float32 and `marks` int32 (see TokenMarks; 0 means not seen) have the same shape. The penalties are
    float32, with one element or one per row. Each operation is rounded separately, so every device produces the same
    bits.
    """
    times = (marks >> 1).to(torch.float32)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    changed = torch.where(marks > 0, repeated, logits)
    changed = changed - frequency * times
    return changed - presence * (times > 0).to(torch.float32)


def kept_finite(changed: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Clamp `changed` to finite values, but keep the model's non-finite logits, so that such rows are detected."""
    return torch.where(torch.isfinite(logits), changed.clamp(-LARGEST, LARGEST), logits)
