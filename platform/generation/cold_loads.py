"""Which adapters the engine need not load, as it reported last: what a request's cold load is told by."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar
from weakref import WeakValueDictionary

from loramux.platform.engine_link.engine_client import EngineClient, EngineUnavailable
from loramux.platform.quotas.decisions import QuotaExceeded
from loramux.platform.quotas.metrics import COLD_LOADS_PER_MINUTE

T = TypeVar("T")

REPORT_INTERVAL_S = 1.0
"""How often the engine is asked while requests name adapters."""

REPORT_WAIT_S = 1.0

STALE_S = 2 * REPORT_INTERVAL_S
"""Nothing is called cold by a report that is older, as one is that was made before a while without requests."""

LOAD_S = 60.0
"""For so long an adapter that a request has the engine load may be missing in its reports."""


class ColdLoads:
    """Tells cold loads by the digests in the engine's pool at its last report, and those that were loaded for us since.

    A report is at most `REPORT_INTERVAL_S` old while requests come: so long an adapter that was evicted is taken for
    resident, and one that several gateways have loaded at the same time is a cold load of each. Nothing is refused by
    such a report: see `admit`. Before the first one nothing is called cold.
    """

    def __init__(self, engine: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._resident: set[str] | None = None
        self._loading: dict[str, float] = {}
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._was_asked = False
        self._asking = asyncio.Lock()
        self._last_asked_s = -math.inf

    async def admit(self, tenant_id: str, digest: str, hold: Callable[[bool], Awaitable[T]]) -> T:
        """What `hold` returns for a request, or a load ahead of requests; it is told whether the engine must load.

        Where a limit on cold loads refuses, the engine is asked again: another gateway may have had it loaded.
        """
        try:
            async with self.admitting(tenant_id, digest) as is_cold:
                return await hold(is_cold)
        except QuotaExceeded as refusal:
            if refusal.policy.metric != COLD_LOADS_PER_MINUTE:
                raise
            await self._renew(self._clock())
            if self._is_cold(digest):
                raise
        return await hold(False)

    @asynccontextmanager
    async def admitting(self, tenant_id: str, digest: str) -> AsyncIterator[bool]:
        """Whether a request for it, which is admitted inside, makes the engine load it.

        The tenant's others for the same one wait for a first that does, and then find it loaded; after an exception
        they do not.
        """
        self._was_asked = True
        if self._resident is None or self._is_cold(digest):
            await self._renew(self._clock() - STALE_S)
        if not self._is_cold(digest):
            yield False
            return
        turn = self._turns.setdefault((tenant_id, digest), asyncio.Lock())
        async with turn:
            is_cold = self._is_cold(digest)
            yield is_cold
            if is_cold:
                self._loading[digest] = self._clock()

    def note_loading(self, digest: str) -> None:
        """The engine loads it, or has just done so: the next report may not know that yet."""
        self._was_asked = True
        self._loading[digest] = self._clock()

    def note_failed(self, digest: str) -> None:
        """The engine could not load it: the next try is a load of its own."""
        self._loading.pop(digest, None)

    async def refresh(self) -> None:
        """Ask the engine; where it does not answer, things are left as they were."""
        self._was_asked = False
        self._last_asked_s = self._clock()
        try:
            stats = await self._engine.stats(REPORT_WAIT_S)
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
        """Keep up with the engine, for ever, while anybody asks."""
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            if self._was_asked:
                await self._renew(self._clock())

    async def _renew(self, since_s: float) -> None:
        """Ask the engine unless it was asked after `since_s`: one question serves everybody who waits for it."""
        async with self._asking:
            if self._last_asked_s <= since_s:
                await self.refresh()

    def _is_cold(self, digest: str) -> bool:
        return self._resident is not None and digest not in self._resident and digest not in self._loading
