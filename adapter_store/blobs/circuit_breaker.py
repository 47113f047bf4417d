"""Stops calls to a failing service, then lets one caller at a time test whether the service has recovered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

BreakerState = Literal["closed", "open", "half_open"]


class CircuitBreaker:
    """A breaker that is closed while calls succeed. Thread-safe.

    After `max_failures` failures in a row it opens, and calls fail immediately. After `first_open_s` the breaker is
    half-open and lets one caller try. A success closes it. A failure opens it for twice as long as before, up to
    `max_open_s`.
    """

    def __init__(
        self,
        max_failures: int = 8,
        first_open_s: float = 1.0,
        max_open_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_failures = max_failures
        self._first_open_s = first_open_s
        self._max_open_s = max_open_s
        self._clock = clock
        self._lock = threading.Lock()
        self._num_failures = 0
        self._open_s = 0.0
        self._next_trial = 0.0
        self._has_trial = False

    @property
    def state(self) -> BreakerState:
        with self._lock:
            if self._open_s == 0:
                return "closed"
            return "half_open" if self._has_trial or self._clock() >= self._next_trial else "open"

    def enter(self) -> float | None:
        """Return the seconds to wait, or None if the caller may proceed.

        A caller that proceeds must then call `succeeded` or `failed`.
        """
        with self._lock:
            if self._open_s == 0:
                return None
            now = self._clock()
            if now < self._next_trial:
                return self._next_trial - now
            # If a trial never reports its outcome, another caller may try after the same interval.
            self._has_trial = True
            self._next_trial = now + self._open_s
            return None

    def succeeded(self) -> None:
        with self._lock:
            self._num_failures = 0
            self._open_s = 0.0
            self._has_trial = False

    def failed(self) -> None:
        with self._lock:
            self._num_failures += 1
            if self._open_s > 0:
                # Ignore calls that started before the breaker opened.
                if self._has_trial:
                    self._open(min(2 * self._open_s, self._max_open_s))
            elif self._num_failures >= self._max_failures:
                self._open(self._first_open_s)

    def _open(self, seconds: float) -> None:
        self._open_s = seconds
        self._next_trial = self._clock() + seconds
        self._has_trial = False
