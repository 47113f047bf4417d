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

MAX_ENTERING = 4
"""Maximum number of lines that are read, planned and reserved at once, so that many lines that end together do not
occupy the gateway when the next ones start.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomLimits:
    capacity: Callable[[], int] = lambda: 16
    """Returns the number of sequences that the engine, or a cluster's replicas together, can run at once."""
    look_s: float = 0.25
    """Interval between looks at the engine, in seconds."""
    queue_s: float = 60.0
    """Longest time for which lines wait because of other requests, in seconds. Then one line joins them."""


class Room:
    """The lines of this server's batches in the engine.

    They fill it, because they are background sequences, which make room for others at once.
    """

    def __init__(self, engine: EngineClient, limits: RoomLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._running: set[Generation] = set()
        self._num_entering = 0
        self._freed = asyncio.Event()
        self._looked_s = -1e9
        self._allowed = 0
        self._started_s = time.monotonic()

    async def enter(self) -> None:
        """Wait until a line may start. Call `add` or `leave` afterwards."""
        while not await self._has_room():
            self._freed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.look_s):
                    await self._freed.wait()
        self._num_entering += 1
        self._started_s = time.monotonic()

    def leave(self) -> None:
        """A line that entered does not run."""
        self._num_entering -= 1
        self._freed.set()

    def add(self, generation: Generation) -> None:
        """A line that entered has started."""
        self._num_entering -= 1
        self._running.add(generation)
        self._freed.set()

    def remove(self, generation: Generation) -> None:
        self._running.discard(generation)
        self._freed.set()

    async def _has_room(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._looked_s >= self._limits.look_s:
            self._looked_s = now_s
            self._allowed = await self._look()
        num_own = self._num_own + self._num_entering
        is_starved = num_own == 0 and now_s - self._started_s >= self._limits.queue_s
        return self._num_entering < MAX_ENTERING and (num_own < self._allowed or is_starved)

    @property
    def _num_own(self) -> int:
        return sum(generation.plan.num_sequences for generation in self._running)

    async def _look(self) -> int:
        """Return how many sequences of lines may run."""
        try:
            stats = await self._engine.call(StatsRequest(), STATS_TIMEOUT_S)
        except (EngineUnavailable, TimeoutError):
            return 0
        # A line without a token may still be waiting, for example for its adapter.
        num_unbegun = sum(one.plan.num_sequences for one in self._running if one.first_token_us is None)
        if stats.num_waiting > num_unbegun + self._num_entering:
            return 0
        num_others = max(0, stats.num_running - (self._num_own - min(stats.num_waiting, num_unbegun)))
        return self._limits.capacity() - num_others
