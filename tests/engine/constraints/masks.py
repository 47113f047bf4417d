from __future__ import annotations

import numpy as np
from llguidance import LLMatcher

from loramux.engine.constraints.grammar import Grammar, Mask


def allowed_tokens(mask: Mask) -> list[int]:
    return [int(token) for token in np.flatnonzero(np.unpackbits(mask, bitorder="little"))]


class _InThisProcess:
    """Follows a grammar with a matcher in this process, without limits on time."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def follow(self, grammar: Grammar) -> None:
        self._matcher.consume_tokens(grammar.tokens[-1:])
        mask = None if self._matcher.is_stopped() else self._matcher.compute_bitmask()
        grammar.settle(mask, failure=self._matcher.get_error() or None)

    def note_settled(self, grammar: Grammar) -> None:
        pass

    def leave(self, grammar: Grammar) -> None:
        pass

    def is_awaited(self, grammar: Grammar) -> bool:
        return True

    def is_throttled(self, grammar: Grammar) -> bool:
        return False


def follow(matcher: LLMatcher, vocab_size: int) -> Grammar:
    """A grammar that follows `matcher` in this process."""
    followers = _InThisProcess(matcher)
    grammar = Grammar("", vocab_size, b"", "", followers)
    followers.follow(grammar)
    return grammar
