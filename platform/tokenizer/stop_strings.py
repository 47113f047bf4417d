"""Finds stop strings in text that comes in pieces, and lets nothing of one through."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back the longest end of the text that could still become a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_found = False

    def feed(self, text: str) -> str:
        """The text that may be shown now. Once a stop string is complete, `is_found`, and what precedes it is all."""
        if not self._stops:
            return text
        text = self._held + text
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            self.is_found = True
            self._held = ""
            return text[: min(starts)]
        num_held = max(_overlap(text, stop) for stop in self._stops)
        shown = text[: len(text) - num_held]
        self._held = text[len(shown) :]
        return shown

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, shorter than `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
