"""Which quota policies refuse most, so that one of thousands can be seen without a series for each."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

WINDOW_S = 300.0
MAX_POLICIES = 4096
"""Policies that are counted at a time; refusals of further ones are counted again once the window has moved."""


class TopRefusals:
    """Refusals by policy over the last five to ten minutes. Thread-safe; its memory is bounded."""

    def __init__(self, num_shown: int = 10, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_shown = num_shown
        self._clock = clock
        self._lock = threading.Lock()
        self._window = 0
        self._current: Counter[str] = Counter()
        self._previous: Counter[str] = Counter()

    def count(self, policy_id: str) -> None:
        with self._lock:
            self._move()
            if policy_id in self._current or len(self._current) < MAX_POLICIES:
                self._current[policy_id] += 1

    def top(self) -> list[tuple[str, int]]:
        """The policies that refused most, with how often, the most first."""
        with self._lock:
            self._move()
            return (self._current + self._previous).most_common(self._num_shown)

    def _move(self) -> None:
        window = int(self._clock() / WINDOW_S)
        if window != self._window:
            self._previous = self._current if window == self._window + 1 else Counter()
            self._current = Counter()
            self._window = window
