"""One sequence's position in its grammar."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

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

    def leave(self, grammar: Grammar) -> None: ...

    def is_awaited(self, grammar: Grammar) -> bool: ...


class Grammar:
    """Follows the committed tokens of one sequence. `mask` returns the allowed next tokens.

    Another process computes each mask. The grammar is not ready while it is compiled and while a mask is computed. Its
    state depends only on the committed tokens, so preemption does not affect it.
    """

    def __init__(self, text: str, vocab_size: int, isolation_key: bytes, share_key: str, followers: Followers) -> None:
        self.text = text
        self.isolation_key = isolation_key
        self.share_key = share_key
        self._vocab_size = vocab_size
        self._followers = followers
        self._mask: Mask | None = None
        self._end_token_ids: Collection[int] = ()
        self._eos_token_ids: Collection[int] = ()
        self.compile_s: float | None = None
        """Time to compile the grammar, in seconds. None if it was compiled already, or not yet."""
        self.tokens: list[int] = []
        """The committed tokens."""
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
        return self._mask is not None or self.has_ended

    @property
    def is_awaited(self) -> bool:
        """True if a step waits for the grammar's next mask. False if its tenant's masks have taken too long."""
        return self._followers.is_awaited(self)

    def accept(self, token_id: int) -> None:
        """Follow a committed token, and request the next mask."""
        if not self.has_ended:
            self.tokens.append(token_id)
            self._mask = None
            self._followers.follow(self)

    def settle(self, found: bytes | None) -> None:
        """Set the mask after the last token. None means that only the end of the sequence can follow."""
        if found is None:
            self.is_complete = True
            return
        bits = np.frombuffer(found, np.uint8)
        # The tokenizer may have fewer tokens than the model's padded vocabulary.
        allowed = np.zeros(-(-self._vocab_size // 32) * 4, np.uint8)
        num_bytes = min(len(bits), -(-self._vocab_size // 8))
        allowed[:num_bytes] = bits[:num_bytes]
        # An adapter can have a smaller vocabulary than the base.
        if self._vocab_size % 8:
            allowed[self._vocab_size // 8] &= (1 << self._vocab_size % 8) - 1
        if any(one < 8 * len(bits) and bits[one // 8] >> one % 8 & 1 for one in self._eos_token_ids):
            for one in self._end_token_ids:
                allowed[one // 8] |= 1 << one % 8
        if allowed.any():
            self._mask = allowed
        else:
            self.failure = "no token of the model's vocabulary can follow"

    def mask(self) -> Mask | None:
        """The allowed next tokens. None if the grammar has ended, because the sequence then ends."""
        return self._mask

    def leave(self) -> None:
        """The sequence has ended."""
        self._followers.leave(self)
