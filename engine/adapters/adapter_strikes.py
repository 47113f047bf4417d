"""Adapters whose values were not finite; after three times within an hour one is refused for a while."""

from __future__ import annotations

from collections.abc import Callable

MAX_STRIKES = 3
"""Steps with rows that were not finite after which an adapter is refused."""

MEMORY_S = 3600.0
"""Each strike is forgotten after this long, so that three in a month are no reason to refuse a tenant."""


class AdapterStrikes:
    """When each adapter's rows were last not finite."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Oldest first; only adapters with strikes that still count are kept, from one strike to the next.
        self._times: dict[str, list[float]] = {}

    def strike(self, digest: str) -> None:
        now = self._clock()
        self._times.setdefault(digest, []).append(now)
        remembered = {one: [time for time in times if now - time < MEMORY_S] for one, times in self._times.items()}
        self._times = {one: times[-MAX_STRIKES:] for one, times in remembered.items() if times}

    def is_quarantined(self, digest: str) -> bool:
        """Whether the adapter is refused until its oldest strike that counts is forgotten."""
        now = self._clock()
        return sum(now - time < MEMORY_S for time in self._times.get(digest, ())) >= MAX_STRIKES
