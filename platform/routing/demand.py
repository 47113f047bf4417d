"""Measures each adapter's share of this gateway's traffic."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

MAX_ADAPTERS = 16_384
"""Maximum number of adapters whose demand is remembered. The least recently requested adapter is forgotten first."""

AVERAGE_S = 60.0
"""Seconds after which a request's weight in the recent count has decayed to 1/e."""


class _Count:
    """The number of requests in flight, and the sum of the decaying weights of recent requests."""

    __slots__ = ("at_s", "num_in_flight", "num_recent")

    def __init__(self, at_s: float) -> None:
        self.num_in_flight = 0
        self.num_recent = 0.0
        self.at_s = at_s

    def decay(self, now_s: float) -> None:
        # If the clock stands still or is set back, the weights do not decay.
        if now_s > self.at_s:
            self.num_recent *= math.exp((self.at_s - now_s) / AVERAGE_S)
        self.at_s = now_s

    def start(self, now_s: float) -> None:
        self.decay(now_s)
        self.num_recent += 1
        self.num_in_flight += 1

    def end(self) -> None:
        self.num_in_flight = max(0, self.num_in_flight - 1)


class AdapterDemand:
    """Each adapter's share of this gateway's requests in flight or of its recent requests, whichever is higher.

    The requests in flight reveal a burst immediately, and the recent requests let its effect decay slowly. Both of an
    adapter's counts are lowered by one standard deviation of a Poisson count, so that one or two chance requests
    hardly count as demand.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._adapters: OrderedDict[int, _Count] = OrderedDict()
        self._all = _Count(clock())

    def start(self, prefix: int | None) -> None:
        """Count the start of a request for the adapter with this digest prefix, or for the base model if None."""
        now_s = self._clock()
        self._all.start(now_s)
        if prefix is None:
            return
        count = self._adapters.get(prefix)
        if count is None:
            count = self._adapters[prefix] = _Count(now_s)
            if len(self._adapters) > MAX_ADAPTERS:
                self._adapters.popitem(last=False)
        else:
            self._adapters.move_to_end(prefix)
        count.start(now_s)

    def end(self, prefix: int | None) -> None:
        self._all.end()
        if prefix is not None and prefix in self._adapters:
            self._adapters[prefix].end()

    def part(self, prefix: int) -> float:
        """Return the adapter's share of the traffic, in [0, 1]."""
        count = self._adapters.get(prefix)
        if count is None:
            return 0.0
        now_s = self._clock()
        count.decay(now_s)
        self._all.decay(now_s)
        recent = _certain(count.num_recent) / max(1.0, self._all.num_recent)
        in_flight = _certain(count.num_in_flight) / max(1, self._all.num_in_flight)
        return min(1.0, max(recent, in_flight))


def _certain(count: float) -> float:
    return max(0.0, count - math.sqrt(count))
