"""Quarantine of adapters that produced non-finite values three times within an hour."""

from __future__ import annotations

from collections.abc import Callable

MAX_STRIKES = 3
"""Number of steps with non-finite rows, within MEMORY_S, after which an adapter is refused."""

MEMORY_S = 3600.0
"""Lifetime of a strike, in seconds. Rare strikes, such as one per day, never quarantine an adapter."""


class AdapterStrikes:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Oldest first. Adapters whose strikes have all expired are removed at the next strike against any adapter.
        self._times: dict[str, list[float]] = {}

    def strike(self, digest: str) -> None:
        now = self._clock()
        self._times.setdefault(digest, []).append(now)
        remembered = {one: [time for time in times if now - time < MEMORY_S] for one, times in self._times.items()}
        self._times = {one: times[-MAX_STRIKES:] for one, times in remembered.items() if times}

    def is_quarantined(self, digest: str) -> bool:
        """True if the adapter is refused. It is accepted again once one of its last MAX_STRIKES strikes expires."""
        now = self._clock()
        return sum(now - time < MEMORY_S for time in self._times.get(digest, ())) >= MAX_STRIKES
