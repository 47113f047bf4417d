"""Finds where the last tokens of one text occur in another, with hash chains as in LZ77 (zlib's longest match)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MIN_MATCH = 3
"""Number of tokens that two places must have in common to match."""

MAX_MATCH = 32
"""Number of tokens that are compared at most. A longer match has this length."""

MAX_CHAIN = 8
"""Number of places that are compared at most, the most recent first."""

MAX_PLACES = 1 << 14
"""Number of the text's last tokens that the index covers at least. It covers at most twice as many, at about 170 bytes
for each.
"""


class TextIndex:
    """The places of all runs of MIN_MATCH tokens of `text`, which may grow at its end."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text
        self._start(0)

    def extend(self, end: int, max_tokens: int = 1 << 62) -> None:
        """Index the tokens before position `end`, but at most `max_tokens` more than before."""
        if end - self._first > 2 * MAX_PLACES:
            self._start(end - MAX_PLACES)
        begin = self._first + len(self._previous)
        end = min(end, begin + max_tokens)
        if end <= begin:
            return
        latest, previous = self._latest, self._previous
        window = self._text[max(0, begin - MIN_MATCH + 1) : end]
        # The first tokens of a text end no run. They have places, so that places are positions.
        for _ in range(begin, min(end, MIN_MATCH - 1)):
            previous.append(-1)
        for place, run in enumerate(zip(window, window[1:], window[2:], strict=False), max(begin, MIN_MATCH - 1)):
            previous.append(latest.get(run, -1))
            latest[run] = place

    def find(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """Return the position after the longest match of the last tokens of `tokens`, and the match's length.

        Among matches of the same length, the most recent one wins. None if there is no match.
        """
        if len(tokens) < MIN_MATCH:
            return None
        text, suffix = self._text, tokens[-MAX_MATCH:]
        place = self._latest.get((suffix[-3], suffix[-2], suffix[-1]), -1)
        best, best_length = -1, 0
        for _ in range(MAX_CHAIN):
            if place < self._first:
                break
            length, most = MIN_MATCH, min(len(suffix), place + 1)
            while length < most and text[place - length] == suffix[-1 - length]:
                length += 1
            if length > best_length:
                best, best_length = place, length
                if length == MAX_MATCH:
                    break
            place = self._previous[place - self._first]
        return (best + 1, best_length) if best_length else None

    def _start(self, first: int) -> None:
        """Forget all places before position `first`."""
        self._first = first
        self._latest: dict[tuple[int, int, int], int] = {}
        # For each place from `first` on, the previous place of the same run, or -1.
        self._previous: array[int] = array("i")
