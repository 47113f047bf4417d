"""Which tokens of a long prompt are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Truncation:
    """How many tokens of a longer prompt are kept: the first ones, or the last if `keeps_end`."""

    num_tokens: int
    keeps_end: bool

    def kept(self, ids: Sequence[int], is_added: Sequence[int] = ()) -> tuple[int, ...]:
        """Return the kept tokens.

        `is_added` is 1 for each token that the tokenizer added to the text. As with transformers' truncation, these
        tokens stay: a pooled state is often that of the first or the last of them.
        """
        num_dropped = len(ids) - self.num_tokens
        if num_dropped <= 0:
            return tuple(ids)
        if any(is_added):
            of_text = [index for index, is_special in enumerate(is_added) if not is_special]
            dropped = set(of_text[:num_dropped] if self.keeps_end else of_text[-num_dropped:])
            ids = [token_id for index, token_id in enumerate(ids) if index not in dropped]
        # There can be more added tokens than may be kept.
        return tuple(ids[-self.num_tokens :] if self.keeps_end else ids[: self.num_tokens])
