"""One sequence's rules about its next token."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

import numpy as np

from loramux.engine.constraints.grammar import Mask
from loramux.engine.constraints.thinking_limit import ThinkingLimit
from loramux.engine.protocol.messages import SamplingParams

PROBLEM = "the constraints of this request allow no token to follow"


class TokenRules:
    """Combines the fields of a request that forbid tokens with the mask of its grammar.

    `tokens` is the sequence's own list, prompt first, which grows as tokens are committed. The rules depend only on the
    request and on these tokens, so preemption does not affect them.
    """

    def __init__(self, params: SamplingParams, tokens: list[int], num_prompt: int, vocab_size: int) -> None:
        self._tokens = tokens
        self._num_prompt = num_prompt
        self._vocab_size = vocab_size
        budget = params.thinking
        self._thinking = None if budget is None else ThinkingLimit(budget, tokens, num_prompt)
        self._bad_words = [(list(word[:-1]), word[-1]) for word in params.bad_words]
        self._allowed = _mask_of(params.allowed_token_ids or slice(vocab_size), vocab_size)
        self.failure: str | None = None
        """Reason why no token can follow, or None."""

    def after(self, drafts: Sequence[int]) -> TokenRules:
        """A copy for the token after `drafts`, as if these followed the committed tokens."""
        other = copy.copy(self)
        other._tokens = [*self._tokens, *drafts]
        if self._thinking is not None:
            other._thinking = self._thinking.following(other._tokens)
        return other

    def restrict(self, mask: Mask | None, held_back: Collection[int] = ()) -> Mask | None:
        """Return the tokens that both `mask` and the rules allow. If there are none, return None and the sequence ends.

        A `mask` of None allows all tokens. The sampler forbids the tokens `held_back`, so they count as not allowed.
        """
        allowed = self._allowed.copy() if mask is None else self._allowed & mask
        _clear(allowed, held_back)
        _clear(allowed, self._ends_of_bad_words())
        forced = None if self._thinking is None else self._thinking.forced_token()
        # Between the tokens of one character, a grammar does not allow the end marker. The thinking then continues
        # until the character is complete.
        if forced is not None and allowed[forced >> 3] >> (forced & 7) & 1:
            return _mask_of([forced], self._vocab_size)
        if not allowed.any():
            self.failure = PROBLEM
        return None if self.failure is not None else allowed

    def _ends_of_bad_words(self) -> list[int]:
        """The tokens that would complete a bad word. As in vLLM, words that begin in the prompt do not count."""
        tokens, room = self._tokens, len(self._tokens) - self._num_prompt
        return [
            last
            for before, last in self._bad_words
            if len(before) <= room and tokens[len(tokens) - len(before) :] == before
        ]


def token_rules(params: SamplingParams, tokens: list[int], num_prompt: int, vocab_size: int) -> TokenRules | None:
    """Return a sequence's rules, or None if its settings contain none."""
    if not params.allowed_token_ids and not params.bad_words and params.thinking is None:
        return None
    return TokenRules(params, tokens, num_prompt, vocab_size)


def _mask_of(token_ids: Collection[int] | slice, vocab_size: int) -> Mask:
    is_allowed = np.zeros(-(-vocab_size // 32) * 32, bool)
    is_allowed[token_ids if isinstance(token_ids, slice) else list(token_ids)] = True
    return np.packbits(is_allowed, bitorder="little")


def _clear(mask: Mask, token_ids: Collection[int]) -> None:
    for token_id in token_ids:
        # An adapter with a smaller vocabulary than the base can lack the base's end tokens.
        if token_id < 8 * len(mask):
            mask[token_id >> 3] &= ~(1 << (token_id & 7)) & 0xFF
