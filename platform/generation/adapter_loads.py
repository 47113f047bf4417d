"""Loads adapters before requests need them, at the same cost as loads caused by requests."""

from __future__ import annotations

import asyncio
import time

from loramux.engine.protocol.messages import AdapterState, Load, Pin
from loramux.platform.admission.database_health import DatabaseHealth, DatabaseTrouble
from loramux.platform.admission.group_commit import GroupCommit
from loramux.platform.admission.records import LoadCharge
from loramux.platform.engine_link.engine_client import EngineClient, EngineUnavailable
from loramux.platform.generation.cold_loads import ColdLoads

CHARGE_WAIT_S = 5.0
"""Timeout for charging a load, in seconds."""
REMEMBERED_S = 24 * 3600.0
"""Time for which a tenant's load is remembered, in seconds."""
MAX_REMEMBERED = 10_000
"""Maximum number of loads that are remembered."""


class AdapterLoads:
    """Loads adapters for the admin API, and notifies `cold_loads`, so that no request is charged for the same load."""

    def __init__(
        self, engine: EngineClient, cold_loads: ColdLoads, commit: GroupCommit, health: DatabaseHealth
    ) -> None:
        self._engine = engine
        self._cold_loads = cold_loads
        self._commit = commit
        self._health = health
        self._loaded_s: dict[tuple[str, str], float] = {}
        """When a tenant last asked for an adapter, by tenant and digest, oldest first."""

    async def load(self, digest: str, charge: LoadCharge | None, timeout_s: float) -> AdapterState:
        """Load an adapter. If it is not resident and `charge` is given, apply the charge first.

        Raises QuotaExceeded or DatabaseTrouble before loading anything, TimeoutError if the engine is still loading the
        adapter after `timeout_s`, EngineUnavailable, or an exception in DATABASE_TROUBLE.
        """
        if charge is not None:
            await self._admit(digest, charge)
            self._remember(charge.tenant_id, digest)
        try:
            answer = await self._engine.call(Load(digest=digest), timeout_s)
        except TimeoutError:
            self._cold_loads.note_loading(digest)
            raise
        self._note(answer)
        return answer

    def loaded_by(self, tenant_id: str) -> set[str]:
        """Return the digests of the adapters that the tenant has had loaded in the last day, on this server."""
        self._forget()
        return {digest for loading_id, digest in self._loaded_s if loading_id == tenant_id}

    def _remember(self, tenant_id: str, digest: str) -> None:
        self._loaded_s.pop((tenant_id, digest), None)
        self._loaded_s[tenant_id, digest] = time.monotonic()
        self._forget()

    def _forget(self) -> None:
        now_s = time.monotonic()
        while self._loaded_s:
            oldest = next(iter(self._loaded_s))
            if len(self._loaded_s) <= MAX_REMEMBERED and now_s - self._loaded_s[oldest] < REMEMBERED_S:
                return
            del self._loaded_s[oldest]

    async def pin(self, digest: str, is_pinned: bool, timeout_s: float) -> AdapterState:
        """Pin or unpin an adapter. Only operators pin adapters, so nobody is charged."""
        answer = await self._engine.call(Pin(digest=digest, is_pinned=is_pinned), timeout_s)
        if is_pinned:
            self._note(answer)
        return answer

    async def _admit(self, digest: str, charge: LoadCharge) -> None:
        if not self._engine.is_ready:
            # Do not charge for a load that cannot be requested.
            raise EngineUnavailable("the engine is not running")

        async def count(is_cold: bool) -> None:
            if is_cold:
                self._health.check()
                await asyncio.shield(self._commit.submit(charge))

        try:
            async with asyncio.timeout(CHARGE_WAIT_S):
                await self._cold_loads.admit(charge.tenant_id, digest, count, is_tied=True)
        except TimeoutError:
            raise DatabaseTrouble("the charge took too long") from None

    def _note(self, answer: AdapterState) -> None:
        if answer.state == "resident":
            self._cold_loads.note_loading(answer.digest)
        elif answer.state == "failed":
            self._cold_loads.note_failed(answer.digest)
