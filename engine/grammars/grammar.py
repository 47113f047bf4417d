"""One sequence's position in its grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = npt.NDArray[np.uint8]
"""Bit mask of the allowed tokens, `[4 * ceil(vocab_size / 32)]`: token `i` is bit `i % 8` of byte `i // 8`."""

Masks = Mapping[int, Mask]
"""The masks of a step's sample rows, by row. Rows without a mask may choose any token."""

NO_MASKS: Masks = {}


class Grammar:
    """Follows the committed tokens of one sequence. `mask` returns the allowed next tokens.

    A grammar is ready once it has been compiled. Its state depends only on the committed tokens, so preemption does not
    affect it.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._matcher: LLMatcher | None = None
        self.failure: str | None = None
        """Reason why no token can follow, for example because the grammar does not compile, exceeds a limit, or allows
        no token of the vocabulary. None if the grammar has not failed."""

    @property
    def is_ready(self) -> bool:
        return self._matcher is not None

    @property
    def is_complete(self) -> bool:
        """True if only the end of the sequence can follow."""
        return self._matcher is not None and self.failure is None and self._matcher.is_stopped()

    def begin(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def accept(self, token_id: int) -> None:
        assert self._matcher is not None
        if self.failure is None and not self._matcher.is_stopped() and not self._matcher.consume_token(token_id):
            self.failure = problem_of(self._matcher)

    def mask(self) -> Mask | None:
        """The allowed next tokens, or None if the grammar is complete or has failed, because the sequence then ends."""
        assert self._matcher is not None
        if self.failure is not None or self._matcher.is_stopped():
            return None
        found = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        # The tokenizer may have fewer tokens than the model's padded vocabulary.
        allowed = np.zeros(-(-self._vocab_size // 32) * 4, np.uint8)
        num_bytes = min(len(found), -(-self._vocab_size // 8))
        allowed[:num_bytes] = found[:num_bytes]
        # An adapter can have a smaller vocabulary than the base.
        if self._vocab_size % 8:
            allowed[self._vocab_size // 8] &= (1 << self._vocab_size % 8) - 1
        if self._matcher.is_error():
            self.failure = problem_of(self._matcher)
        elif not allowed.any():
            self.failure = "no token of the model's vocabulary can follow"
        return None if self.failure is not None else allowed


def problem_of(matcher: LLMatcher) -> str:
    """Describe in one line why a matcher failed."""
    first, *rest = matcher.get_error().splitlines() or ["the grammar cannot be followed"]
    # A regex's error comes last, after the pattern.
    reason = next((line for line in reversed(rest) if line.startswith("error: ")), "")
    return f"{first.rstrip(':')}: {reason}" if reason else first
