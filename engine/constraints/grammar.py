"""One sequence's position in its grammar."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile
from typing import Protocol

import numpy as np
import numpy.typing as npt

from loramux.engine.constraints.problems import UNUSABLE

Mask = npt.NDArray[np.uint8]
"""Bit mask of the allowed tokens, `[4 * ceil(vocab_size / 32)]`: token `i` is bit `i % 8` of byte `i // 8`."""

Masks = Mapping[int, Mask]
"""The masks of a step's sample rows, by row. Rows without a mask may choose any token."""

NO_MASKS: Masks = {}


class Followers(Protocol):
    """Processes that compute the masks of grammars."""

    def follow(self, grammar: Grammar) -> None:
        """Compute the mask after the grammar's tokens, and pass it to `settle` later."""
        ...

    def note_settled(self, grammar: Grammar) -> None:
        """The mask after the grammar's tokens is known, or the grammar has ended."""
        ...

    def leave(self, grammar: Grammar) -> None: ...

    def is_awaited(self, grammar: Grammar) -> bool: ...

    def is_throttled(self, grammar: Grammar) -> bool: ...


class Grammar:
    """Follows the committed tokens of one sequence. `mask` returns the allowed next tokens.

    Another process computes each mask. The grammar is not ready while it is compiled and while a mask is computed. Its
    state depends only on the committed tokens, so preemption does not affect it.

    Where only one token is allowed, the process also follows this token, and so on. These tokens are forced: they will
    certainly be chosen, and their masks are known before.
    """

    def __init__(self, text: str, vocab_size: int, isolation_key: bytes, share_key: str, followers: Followers) -> None:
        self.text = text
        self.isolation_key = isolation_key
        self.share_key = share_key
        self._vocab_size = vocab_size
        self._followers = followers
        # What can follow the forced tokens. If `_mask` is None, the grammar ends there, as complete or with a failure.
        self._mask: Mask | None = None
        self._last_failure: str | None = None
        self._forced: deque[int] = deque()
        self._end_token_ids: Collection[int] = ()
        self._eos_token_ids: Collection[int] = ()
        self.looks_ahead = True
        """True if the process may follow forced tokens before they are committed."""
        self.compile_s: float | None = None
        """Time to compile the grammar, in seconds. None if it was compiled already, or not yet."""
        self.tokens: list[int] = []
        """The committed tokens."""
        self.num_repeated = 0
        """Number of tokens that a new process follows again before it computes the next mask."""
        self.is_complete = False
        """True if only the end of the sequence can follow."""
        self.failure: str | None = None
        """Reason why no token can follow, for example because the grammar does not compile, exceeds a limit, or allows
        no token of the vocabulary. None if the grammar has not failed."""

    def let_end_with(self, token_ids: Collection[int], eos_token_ids: Collection[int]) -> None:
        """Allow `token_ids` wherever one of `eos_token_ids`, the only end tokens that the grammar knows, is allowed."""
        self._end_token_ids, self._eos_token_ids = token_ids, eos_token_ids

    @property
    def has_ended(self) -> bool:
        return self.is_complete or self.failure is not None

    @property
    def is_ready(self) -> bool:
        return bool(self._forced) or self._mask is not None or self.has_ended

    @property
    def is_awaited(self) -> bool:
        """True if a step waits for the grammar's next mask. False if its tenant's masks have taken too long."""
        return self._followers.is_awaited(self)

    @property
    def is_throttled(self) -> bool:
        """True if the tenant's masks are computed one at a time, and not continuously, so that others get theirs."""
        return self._followers.is_throttled(self)

    @property
    def forced(self) -> tuple[int, ...]:
        """The forced tokens. The last is left out if no token can follow it."""
        forced = tuple(self._forced)
        return forced if self._mask is not None else forced[:-1]

    def accept(self, token_id: int) -> None:
        """Follow a committed token, and request the next mask unless it is known."""
        if self.has_ended:
            return
        self.tokens.append(token_id)
        if not self._forced:
            self._mask = None
            self._followers.follow(self)
            return
        if token_id == self._forced.popleft():
            self._reach()
        else:
            # Another rule of the request forbids the only token that the grammar allows.
            self.failure = UNUSABLE
        self._followers.note_settled(self)

    def settle(self, found: bytes | None, forced: Sequence[int] = (), failure: str | None = None) -> None:
        """Set what follows the last token: the `forced` tokens, and then the mask `found`.

        A mask of None means that only the end of the sequence can follow or, with a `failure`, that the grammar fails.
        """
        usable = list(takewhile(lambda token: token < self._vocab_size, forced))
        self._forced.extend(usable)
        is_cut = len(usable) < len(forced)
        self._mask = None if found is None or is_cut else self._allowed(found)
        self._last_failure = failure
        if is_cut or (found is not None and self._mask is None):
            self._last_failure = "no token of the model's vocabulary can follow"
        self._reach()

    def _reach(self) -> None:
        """Notice if the grammar ends after its last token."""
        if not self._forced and self._mask is None:
            self.failure = self._last_failure
            self.is_complete = self.failure is None

    def _allowed(self, found: bytes) -> Mask | None:
        """The mask for the sequence's own vocabulary. None if it allows no token."""
        bits = np.frombuffer(found, np.uint8)
        # The tokenizer may have fewer tokens than the model's padded vocabulary.
        allowed = self._no_tokens()
        num_bytes = min(len(bits), -(-self._vocab_size // 8))
        allowed[:num_bytes] = bits[:num_bytes]
        # An adapter can have a smaller vocabulary than the base.
        if self._vocab_size % 8:
            allowed[self._vocab_size // 8] &= (1 << self._vocab_size % 8) - 1
        if any(one < 8 * len(bits) and bits[one // 8] >> one % 8 & 1 for one in self._eos_token_ids):
            for one in self._end_token_ids:
                allowed[one // 8] |= 1 << one % 8
        return allowed if allowed.any() else None

    def _no_tokens(self) -> Mask:
        return np.zeros(-(-self._vocab_size // 32) * 4, np.uint8)

    def mask(self, num_forced: int = 0) -> Mask | None:
        """The tokens allowed after the next `num_forced` forced tokens. None if the grammar ends there."""
        if num_forced == len(self._forced):
            return self._mask
        token = self._forced[num_forced]
        mask = self._no_tokens()
        mask[token // 8] = 1 << token % 8
        return mask

    def leave(self) -> None:
        """The sequence has ended."""
        self._followers.leave(self)
