"""What a request has done to the model's logits before a token is chosen: a bias, and penalties on earlier tokens."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch

from loramux.engine.messages import SamplingParams

LARGEST = 1e30
"""What edited logits are kept within: finite, so that a setting cannot pass for a model that has lost its numbers."""


class TokenMarks:
    """The distinct tokens of a sequence, each marked `2 * (times it was generated) + (1 if it is in the prompt)`."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._ids = array("q", self._places)
        self._marks = array("i", [1]) * len(self._places)

    def add(self, token_id: int) -> None:
        """One more time generated."""
        place = self._places.setdefault(token_id, len(self._ids))
        if place == len(self._ids):
            self._ids.append(token_id)
            self._marks.append(0)
        self._marks[place] += 2

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of the ids int64 and of their marks int32, `[num_distinct]` each."""
        return torch.from_numpy(np.array(self._ids)), torch.from_numpy(np.array(self._marks))


class LogitPenalties:
    """One sequence's bias and penalties; its identity is the sequence's.

    `tokens` is the sequence's own list, prompt first, which grows as tokens are committed. `bias_ids` int64 and
    `bias` float32 `[num_biased]`; `penalties` float32 `[3, 1]` are repetition, presence and frequency.
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
        """The marks of the prompt and of the first `num_chosen` new tokens, each of which was committed or noted."""
        if self._marks is None or self._num_marked > num_chosen:
            self._marks = TokenMarks(self._tokens[: self._num_prompt])
            self._num_marked = 0
        for token_id in self._tokens[self._num_prompt + self._num_marked : self._num_prompt + num_chosen]:
            self._note(token_id)
        assert self._num_marked == num_chosen, "a token in flight was not noted when it was chosen"
        return self._marks

    def note(self, token_id: int, num_chosen: int) -> None:
        """The token after the first `num_chosen` was chosen on the host; it may be committed only later."""
        if self.has_penalties and self._num_marked == num_chosen:
            self._note(token_id)

    def apply(self, logits: torch.Tensor, num_chosen: int) -> None:
        """Edit one row on the host, float32 `[vocab_size]`; the work grows with the tokens concerned only."""
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
    """The bias and penalties that a sequence asks for; None, at no cost to any step, where it asks for none."""
    return LogitPenalties(params, tokens, num_prompt) if params.logit_bias or params.has_penalties else None


def penalised(
    logits: torch.Tensor,
    marks: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Penalties as vLLM and, but for the repetition penalty, the OpenAI API define them.

    With `times` the number of times that a token was generated:

        x = logit / repetition if logit > 0 else logit * repetition     (tokens of the prompt or the answer)
        x - frequency * times - presence * (times > 0)

    `logits` float32 and `marks` int32 (see TokenMarks; 0 is a token not seen) of one shape, of which the penalties,
    float32, have the rows, or one element. Each step is rounded by itself, so that every device gives the same bits.
    """
    times = (marks >> 1).to(torch.float32)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    changed = torch.where(marks > 0, repeated, logits)
    changed = changed - frequency * times
    return changed - presence * (times > 0).to(torch.float32)


def kept_finite(changed: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """`changed` within the finite; where the model's own logit is not finite, that stays to be found."""
    return torch.where(torch.isfinite(logits), changed.clamp(-LARGEST, LARGEST), logits)
