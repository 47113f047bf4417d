"""Drafts of the base's own head for one sequence, and how often they are right."""

from __future__ import annotations

from loramux.engine.drafting.draft import DraftSource
from loramux.engine.drafting.drafter import STEP_OF_RATE, Proposal

FIRST_RATE = 0.6
"""The rate of acceptance that a sequence begins with. The report of DeepSeek-V3 names 0.85 to 0.9 for its head, and
adapters may lower it.
"""

BEST_RATE = 0.99
"""The rate that a head which is always right approaches."""

PROBE_STEPS = 32
"""Number of steps without a draft after which the head drafts once, to find out whether it is right more often now."""


class HeadDrafter:
    """Keeps the head's last draft of a sequence. `tokens` is the sequence's own list, prompt first.

    It learns from each token that is committed at the place of a draft, whether or not a step verified the draft.
    """

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._rate = FIRST_RATE
        # The position of the last draft, or None once it has been compared.
        self._place: int | None = None
        self._drafted: int | None = None
        self._source: DraftSource = "head"

    @property
    def rate(self) -> float:
        """The probability that the next draft is right, as far as it is known."""
        self._read()
        return self._rate

    def note(self, drafted: int | None, source: DraftSource) -> None:
        """The head drafts this token as the one after the sequence's newest token. None means that its logits were not
        finite, which counts as a wrong draft and is not proposed.
        """
        self._read()
        self._place, self._drafted, self._source = len(self._tokens), drafted, source

    def propose(self) -> Proposal | None:
        """The draft of the next token, or None if the head has not seen the newest token or has no draft."""
        self._read()
        if self._place is None or self._drafted is None:
            return None
        return Proposal((self._drafted,), self._rate, self._source)

    def _read(self) -> None:
        if self._place is not None and self._place < len(self._tokens):
            is_right = self._tokens[self._place] == self._drafted
            self._rate += STEP_OF_RATE * (BEST_RATE * is_right - self._rate)
            self._place = None
