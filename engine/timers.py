"""What is to happen at a time, on the engine's own clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Timers:
    """Calls actions once their time has come; an action that is no longer wanted finds that out itself."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pending: list[tuple[float, int, Callable[[], None]]] = []
        self._num_added = 0

    def now(self) -> float:
        return self._clock()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self._num_added += 1
        heapq.heappush(self._pending, (self._clock() + seconds, self._num_added, action))

    def fire(self) -> None:
        """Call what is due, in the order of its times."""
        while self._pending and self._pending[0][0] <= self._clock():
            heapq.heappop(self._pending)[2]()
