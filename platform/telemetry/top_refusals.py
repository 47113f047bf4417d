"""The metric of the quota policies with the most refusals."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

REFUSALS_WINDOW_S = 300.0
MAX_POLICIES = 4096
"""Maximum number of policies counted per window. Refusals by other policies are ignored until the next window."""


class TopRefusals(Collector):
    """Refusals by policy over the last five to ten minutes. Thread-safe. Uses bounded memory."""

    def __init__(self, num_shown: int = 10, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_shown = num_shown
        self._clock = clock
        self._lock = threading.Lock()
        self._window = 0
        self._current: collections.Counter[str] = collections.Counter()
        self._previous: collections.Counter[str] = collections.Counter()

    def count(self, policy_id: str) -> None:
        with self._lock:
            self._move()
            if policy_id in self._current or len(self._current) < MAX_POLICIES:
                self._current[policy_id] += 1

    def top(self) -> list[tuple[str, int]]:
        """Return the policies with the most refusals and their counts, highest first."""
        with self._lock:
            self._move()
            return (self._current + self._previous).most_common(self._num_shown)

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "loramux_quota_top_refusals", "Refusals by policy in the last 5 to 10 minutes, top ten", labels=("policy",)
        )
        for policy_id, count in self.top():
            family.add_metric((policy_id,), count)
        yield family

    def _move(self) -> None:
        window = int(self._clock() / REFUSALS_WINDOW_S)
        if window != self._window:
            self._previous = self._current if window == self._window + 1 else collections.Counter()
            self._current = collections.Counter()
            self._window = window
