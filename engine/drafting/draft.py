"""A draft: tokens that a step verifies together with the next token of a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from loramux.engine.sequences.sequence import Sequence

DraftSource = Literal["text", "prediction", "head", "drafter", "grammar"]
"""Where a draft comes from. `head` is the base's own head as it was trained, and `drafter` is the head with the drafter
of the sequence's adapter.
"""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that a step verifies after the next token of a sequence."""

    tokens: tuple[int, ...]
    source: DraftSource

    def shortened(self, num_tokens: int) -> Draft:
        return replace(self, tokens=self.tokens[:num_tokens])

    def num_equal(self, chosen: Iterable[int | None]) -> int:
        """Number of the draft's tokens that equal the tokens chosen in their places, up to the first difference."""
        pairs = enumerate(zip(self.tokens, chosen, strict=False))
        return next((place for place, (drafted, token) in pairs if drafted != token), len(self.tokens))


class DraftRoom(Protocol):
    """Finds pages for the K and V of drafts, and for a copy of a state: see `Scheduler.room_for_drafts`."""

    def __call__(self, sequence: Sequence, num_drafts: int) -> int: ...


def max_drafts(sequence: Sequence) -> int:
    """Maximum number of tokens of a sequence that a step can verify after the sequence's next token.

    It is 0 if the request does not want drafts, and unless the next row is the sequence's last.
    """
    if not sequence.add.speculates or sequence.is_pooled or sequence.num_unscored:
        return 0
    # A row of a prompt's chunk can be followed by a known token.
    if sequence.num_pending != 1:
        return 0
    # The step chooses one token itself, and no token may follow the last within the limit.
    return max(0, sequence.num_reserved - sequence.num_tokens - 1)
