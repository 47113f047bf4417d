"""Limits the traffic that retries add while a service is in trouble."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class RetryBudget:
    """A token bucket for retries, shared by all callers. Thread-safe.

    The bucket starts with `capacity` tokens and never has more. A retry takes one token, and a success returns
    `per_success` tokens. The bucket also gains `refill_per_s` tokens per second, so that a rarely used store can be
    retried.
    """

    def __init__(
        self,
        capacity: float = 20.0,
        per_success: float = 0.1,
        refill_per_s: float = 0.5,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = capacity
        self._per_success = per_success
        self._refill_per_s = refill_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._level = capacity
        self._refilled_at = clock()

    def take_retry(self) -> bool:
        """Take one retry from the budget and return True, or return False if none is left."""
        with self._lock:
            now = self._clock()
            self._add((now - self._refilled_at) * self._refill_per_s)
            self._refilled_at = now
            if self._level < 1:
                return False
            self._level -= 1
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._add(self._per_success)

    def _add(self, amount: float) -> None:
        self._level = min(self._capacity, self._level + amount)
