"""Which adapters the engine need not load, as it reported last: what a request's cold load is told by."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from loramux.platform.engine_client import EngineClient, EngineUnavailable

REPORT_INTERVAL_S = 1.0
"""How often the engine is asked while requests name adapters."""

REPORT_WAIT_S = 1.0

LOAD_S = 60.0
"""For so long an adapter that a request has the engine load may be missing in its reports."""


class ResidentAdapters:
    """The digests in the engine's pool at its last report, and those that requests have had it load since.

    A report is at most `REPORT_INTERVAL_S` old while requests come: so long an adapter that was evicted is taken for
    resident, and one that several gateways have loaded at the same time is a cold load of each. Before the first
    report nothing is called cold.
    """

    def __init__(self, engine: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock
        self._resident: set[str] | None = None
        self._loading: dict[str, float] = {}
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._was_asked = False

    @asynccontextmanager
    async def admitting(self, tenant_id: str, digest: str) -> AsyncIterator[bool]:
        """Whether a request for it, which is admitted inside, makes the engine load it.

        The tenant's others for the same one wait for a first that does, and then find it loaded; after an exception
        they do not.
        """
        self._was_asked = True
        if self._resident is None:
            await self.refresh()
        if not self._is_cold(digest):
            yield False
            return
        turn = self._turns.setdefault((tenant_id, digest), asyncio.Lock())
        async with turn:
            is_cold = self._is_cold(digest)
            yield is_cold
            if is_cold:
                self._loading[digest] = self._clock()

    async def refresh(self) -> None:
        """Ask the engine; where it does not answer, things are left as they were."""
        self._was_asked = False
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
                await self.refresh()

    def _is_cold(self, digest: str) -> bool:
        return self._resident is not None and digest not in self._resident and digest not in self._loading
