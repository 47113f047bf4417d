"""Predicts whether a request causes a cold load, from the engine's last report of resident adapters."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar
from weakref import WeakValueDictionary

from loramux.engine.protocol.messages import StatsRequest
from loramux.platform.engine_link.engine_client import EngineClient, EngineUnavailable
from loramux.platform.quotas.decisions import QuotaExceeded
from loramux.platform.quotas.metrics import COLD_LOADS_PER_MINUTE

T = TypeVar("T")

REPORT_INTERVAL_S = 1.0
"""Interval, in seconds, between the engine's reports while requests for adapters arrive."""

REPORT_WAIT_S = 1.0

STALE_S = 2 * REPORT_INTERVAL_S
"""Maximum age, in seconds, of a report that can show an adapter to be cold.

An older report is refreshed first. Reports are not refreshed while no requests arrive.
"""

LOAD_S = 60.0
"""Maximum time, in seconds, that an adapter counts as loading while it is missing from the engine's reports."""


HeldElsewhere = Callable[[str, str | None], bool]
"""Returns whether another server that can run requests holds the adapter with a given digest. Only servers of the base
with the given identifier count. None stands for this server's own base.
"""


def held_nowhere_else(digest: str, base_id: str | None) -> bool:
    """Always False: the default for a server that shares no requests with other servers."""
    return False


class ColdLoads:
    """Predicts cold loads from the engine's last report of its pool and this gateway's own loads since then.

    While requests for adapters arrive, a new report is requested every `REPORT_INTERVAL_S`. Until the next report, an
    evicted adapter counts as resident, and an adapter that several gateways load concurrently counts as a cold load for
    each of them. No request is refused because of an outdated report: see `admit`. Before the first report, no load
    counts as cold.

    A load also does not count as cold while `is_held_elsewhere` finds the adapter on another server, which can run the
    request. If servers of another base run the request, only their adapters count.
    """

    def __init__(
        self,
        engine: EngineClient,
        clock: Callable[[], float] = time.monotonic,
        is_held_elsewhere: HeldElsewhere = held_nowhere_else,
    ) -> None:
        self._engine = engine
        self._is_held_elsewhere = is_held_elsewhere
        self._clock = clock
        self._resident: set[str] | None = None
        self._loading: dict[str, float] = {}
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._was_asked = False
        self._asking = asyncio.Lock()
        self._last_asked_s = -math.inf

    async def admit(
        self,
        tenant_id: str,
        digest: str,
        hold: Callable[[bool], Awaitable[T]],
        is_tied: bool = False,
        other_base: str | None = None,
    ) -> T:
        """Call `hold` and return its result. The argument of `hold` is True if the engine must load the adapter.

        With `is_tied`, this server's own engine must load the adapter, even if other servers hold it. `other_base` is
        the base whose servers will run the request, or None if it is this server's own.

        If the cold-load limit refuses the request, ask the engine for a new report, because another gateway may have
        loaded the adapter. If one has, call `hold(False)`.
        """
        try:
            async with self.admitting(tenant_id, digest, is_tied, other_base) as is_cold:
                return await hold(is_cold)
        except QuotaExceeded as refusal:
            if refusal.policy.metric != COLD_LOADS_PER_MINUTE:
                raise
            await self._renew(self._clock())
            if self._is_cold(digest, is_tied, other_base):
                raise
        return await hold(False)

    @asynccontextmanager
    async def admitting(
        self, tenant_id: str, digest: str, is_tied: bool = False, other_base: str | None = None
    ) -> AsyncIterator[bool]:
        """Yield True if the request that this context admits will make the engine load the adapter.

        In that case, the tenant's other requests for the adapter wait until the context exits. They then count as warm
        unless the context raised an exception.
        """
        self._was_asked = True
        if self._resident is None or self._is_cold(digest, is_tied, other_base):
            await self._renew(self._clock() - STALE_S)
        if not self._is_cold(digest, is_tied, other_base):
            yield False
            return
        load = _load(digest, other_base)
        turn = self._turns.setdefault((tenant_id, load), asyncio.Lock())
        async with turn:
            is_cold = self._is_cold(digest, is_tied, other_base)
            yield is_cold
            if is_cold:
                self._loading[load] = self._clock()

    def note_loading(self, digest: str) -> None:
        """Record that the engine is loading or has just loaded the adapter. The next report may not show it yet."""
        self._was_asked = True
        self._loading[digest] = self._clock()

    def note_failed(self, digest: str) -> None:
        """Record that the engine could not load the adapter. The next attempt counts as a new load."""
        self._loading.pop(digest, None)

    async def refresh(self) -> None:
        """Ask the engine for a report. If the engine does not answer, keep the last report."""
        self._was_asked = False
        self._last_asked_s = self._clock()
        try:
            stats = await self._engine.call(StatsRequest(), REPORT_WAIT_S)
        except (EngineUnavailable, TimeoutError):
            return
        self._resident = {adapter.digest for adapter in stats.adapters}
        oldest_s = self._clock() - LOAD_S
        self._loading = {
            digest: since_s
            for digest, since_s in self._loading.items()
            if digest not in self._resident and since_s > oldest_s
        }

    async def follow(self) -> None:
        """Loop forever, refreshing the report while requests for adapters arrive."""
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            if self._was_asked:
                await self._renew(self._clock())

    async def _renew(self, since_s: float) -> None:
        """Ask the engine unless it was asked after `since_s`, so that one answer serves all waiting requests."""
        async with self._asking:
            if self._last_asked_s <= since_s:
                await self.refresh()

    def _is_cold(self, digest: str, is_tied: bool, other_base: str | None) -> bool:
        if self._resident is None or _load(digest, other_base) in self._loading:
            return False
        if other_base is None and digest in self._resident:
            return False
        return is_tied or not self._is_held_elsewhere(digest, other_base)


def _load(digest: str, other_base: str | None) -> str:
    """Return a key for loads of an adapter on the servers of a base."""
    return digest if other_base is None else f"{digest} for {other_base}"
