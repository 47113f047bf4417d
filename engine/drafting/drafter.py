"""Drafts the next tokens of one sequence from its own text, and from the prediction that came with the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loramux.engine.drafting.draft import DraftSource
from loramux.engine.drafting.text_index import TextIndex

INDEXED_AT_ONCE = 1024
"""Number of tokens of a long prompt or prediction that are indexed before one step. It bounds the delay of the step."""

MATCH_BOUNDS = (6, 16)
"""Lengths from which matches count as longer. Drafts after longer matches are accepted more often."""

FIRST_RATES = (0.4, 0.6, 0.8)
"""The rates of acceptance that a sequence begins with, by MATCH_BOUNDS."""

PREDICTION_RATE = 0.8

STEP_OF_RATE = 0.15
"""How far one verified token moves a rate."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens that may come next. Each is accepted with a probability of about `rate` if all before it are."""

    tokens: tuple[int, ...]
    rate: float
    source: DraftSource
    kind: int = 0
    """Index of the rate among those of the drafter."""

    def expected(self, num_tokens: int) -> float:
        """The number of tokens that are probably accepted of the first `num_tokens`."""
        return self.rate * (1 - self.rate**num_tokens) / (1 - self.rate)


class Drafter:
    """Proposes tokens that followed the same tokens before, and learns how often it is right.

    `tokens` is the sequence's own list, prompt first, which grows as tokens are committed. Drafts come from
    `prediction` while the answer follows it. After a divergence, they come from the longest match in the prediction or,
    with `reads_text`, in `tokens`.
    """

    def __init__(
        self, tokens: list[int], num_prompt: int, prediction: Sequence[int] = (), *, reads_text: bool = True
    ) -> None:
        self._tokens = tokens
        self._own = TextIndex(tokens)
        self._reads_text = reads_text
        self._prediction = prediction
        self._predicted = TextIndex(prediction)
        # The place in the prediction that the answer has reached, or None after a divergence.
        self._place: int | None = 0 if prediction else None
        self._num_read = num_prompt
        self._rates = [*FIRST_RATES, PREDICTION_RATE]
        self._proposal: Proposal | None = None

    @property
    def follows_prediction(self) -> bool:
        """True if the answer follows the prediction, which goes on."""
        self._read()
        return self._place is not None and self._place < len(self._prediction)

    def propose(self, max_tokens: int) -> Proposal | None:
        """The most likely next tokens, at most `max_tokens`, which is at least 1, or None."""
        self._read()
        self._proposal = self._next(max_tokens)
        return self._proposal

    def _read(self) -> None:
        """Compare the last proposal with the tokens committed since then, whether or not a step verified it."""
        tokens = self._tokens
        committed = tokens[self._num_read :]
        if not committed:
            return
        self._num_read = len(tokens)
        if self._proposal is not None:
            kind = self._proposal.kind
            for drafted, token in zip(self._proposal.tokens, committed, strict=False):
                is_right = drafted == token
                self._rates[kind] += STEP_OF_RATE * (0.99 * is_right - self._rates[kind])
                if not is_right:
                    break
            self._proposal = None
        if self._place is not None:
            end = self._place + len(committed)
            self._place = end if tuple(self._prediction[self._place : end]) == tuple(committed) else None

    def _next(self, max_tokens: int) -> Proposal | None:
        tokens = self._tokens
        found = None
        if self._reads_text:
            # Without its last token, because the text always ends with its own last tokens.
            self._own.extend(len(tokens) - 1, INDEXED_AT_ONCE)
            found = self._own.find(tokens)
        if self._prediction:
            if self._place is None:
                self._predicted.extend(len(self._prediction), INDEXED_AT_ONCE)
                predicted = self._predicted.find(tokens)
                if predicted is not None and (found is None or predicted[1] >= found[1]):
                    self._place = predicted[0]
            if self._place is not None:
                drafted = tuple(self._prediction[self._place : self._place + max_tokens])
                if drafted:
                    return Proposal(drafted, self._rates[-1], "prediction", len(FIRST_RATES))
                self._place = None
        if found is None:
            return None
        place, length = found
        drafted = tuple(tokens[place : place + max_tokens])
        # A match that overlaps the end goes on with what it has copied, as in LZ77.
        while len(drafted) < max_tokens:
            drafted = (*drafted, *drafted[: max_tokens - len(drafted)])
        kind = sum(length >= bound for bound in MATCH_BOUNDS)
        return Proposal(drafted, self._rates[kind], "text", kind)
