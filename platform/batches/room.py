"""Decides how many lines of batches may run, so that they fill only what other requests leave free."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from loramux.engine.protocol.messages import StatsRequest
from loramux.platform.engine_link.engine_client import EngineClient, EngineUnavailable
from loramux.platform.generation.generation import Generation

STATS_TIMEOUT_S = 5.0

MAX_ENTERING = 16
"""Maximum number of lines that are read, planned and reserved at once, so that many lines that end together do not
occupy the gateway when the next ones start.
"""

YIELD_S = 0.25
"""Longest time, since a line last entered, for which lines wait for the first tokens of other requests, in seconds."""

YIELD_LOOK_S = 0.02
"""Interval between looks at these requests, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomLimits:
    capacity: Callable[[], int] = lambda: 16
    """Returns the number of sequences that the engine, or a cluster's replicas together, can run at once."""
    look_s: float = 0.25
    """Interval between looks at the engine, in seconds."""
    queue_s: float = 60.0
    """Longest time for which lines wait because of other requests, in seconds. Then one line joins them."""
    gather_s: float = 0.05
    """How long lines wait for more room, in seconds, so that they enter together. Reading and reserving together costs
    less.
    """


class Entry:
    """A line that has entered and has not started. `leave` does nothing the second time."""

    def __init__(self, entering: set[Entry], freed: asyncio.Event) -> None:
        self._entering = entering
        self._freed = freed

    def leave(self) -> None:
        if self in self._entering:
            self._entering.remove(self)
            self._freed.set()


class Room:
    """The lines of this server's batches in the engine.

    They fill it, because they are background sequences, which make room for others at once. `is_awaited` returns
    whether this server runs another request for which the engine has sent nothing yet.
    """

    def __init__(
        self, engine: EngineClient, limits: RoomLimits, is_awaited: Callable[[], bool] = lambda: False
    ) -> None:
        self._engine = engine
        self._limits = limits
        self._is_awaited = is_awaited
        self._running: set[Generation] = set()
        self._entering: set[Entry] = set()
        self._freed = asyncio.Event()
        self._looked_s = -1e9
        self._allowed = 0
        self._started_s = time.monotonic()

    @property
    def capacity(self) -> int:
        return self._limits.capacity()

    async def enter(self, most: int) -> list[Entry]:
        """Wait until lines may start, and return an entry for each, from 1 to `most`. A line leaves its entry when it
        has started, or if it does not run.
        """
        if await self._until_room() < min(most, MAX_ENTERING):
            await asyncio.sleep(self._limits.gather_s)
        num_entries = min(most, await self._until_room())
        entries = [Entry(self._entering, self._freed) for _ in range(num_entries)]
        self._entering.update(entries)
        self._started_s = time.monotonic()
        return entries

    def add(self, generation: Generation) -> None:
        """A line has started."""
        self._running.add(generation)

    def remove(self, generation: Generation) -> None:
        """A line has ended. It can already have been removed."""
        self._running.discard(generation)
        self._freed.set()

    async def _until_room(self) -> int:
        """Wait until lines may enter, and return how many."""
        while True:
            is_yielding = self._is_awaited() and time.monotonic() - self._started_s < YIELD_S
            num_free = 0 if is_yielding else await self._num_free()
            if num_free > 0:
                return num_free
            self._freed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(YIELD_LOOK_S if is_yielding else self._limits.look_s):
                    await self._freed.wait()

    async def _num_free(self) -> int:
        now_s = time.monotonic()
        if now_s - self._looked_s >= self._limits.look_s:
            self._looked_s = now_s
            self._allowed = await self._look()
        num_own = self._num_own + len(self._entering)
        is_starved = num_own == 0 and now_s - self._started_s >= self._limits.queue_s
        return min(MAX_ENTERING - len(self._entering), max(self._allowed - num_own, int(is_starved)))

    @property
    def _num_own(self) -> int:
        return sum(generation.plan.num_sequences for generation in self._running)

    async def _look(self) -> int:
        """Return how many sequences of lines may run."""
        try:
            stats = await self._engine.call(StatsRequest(), STATS_TIMEOUT_S)
        except (EngineUnavailable, TimeoutError):
            return 0
        # Lines with long answers stay until they are stored, after they have left the engine.
        in_engine = [one for one in self._running if one.status == "open"]
        num_own = sum(one.plan.num_sequences for one in in_engine)
        # A line for which the engine has sent nothing may still be waiting, for example for its adapter.
        num_unbegun = sum(one.plan.num_sequences for one in in_engine if not one.has_begun)
        if stats.num_waiting > num_unbegun + len(self._entering):
            return 0
        num_others = max(0, stats.num_running - (num_own - min(stats.num_waiting, num_unbegun)))
        return self._limits.capacity() - num_others
