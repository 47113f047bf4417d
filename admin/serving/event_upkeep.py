"""Periodic work for events: reports what happened in the engine and to budgets, and deletes old events."""

from __future__ import annotations

import asyncio

from loramux.admin.rest.services import AdminServices
from loramux.admin.server.background import repeat
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.events.budget_events import BudgetEvents
from loramux.platform.events.residency_events import ResidencyEvents

ENGINE_INTERVAL_S = 2.0
BUDGET_INTERVAL_S = 10.0
SWEEP_INTERVAL_S = 600.0
STATS_TIMEOUT_S = 5.0


class EventUpkeep:
    """`server_id` names this server in events. Several servers on one database can run this concurrently."""

    def __init__(self, services: AdminServices, server_id: str, kept_days: int, budget_percent: int) -> None:
        self._services = services
        self._kept_days = kept_days
        self._budgets = BudgetEvents(services.database, budget_percent)
        self._residency = ResidencyEvents(services.database, server_id)

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            # Separate tasks, because an engine that does not answer must not delay budgets.
            group.create_task(repeat(self.report_engine, ENGINE_INTERVAL_S, "changes to adapters are not reported yet"))
            group.create_task(repeat(self.report_budgets, BUDGET_INTERVAL_S, "budgets are not looked at"))
            group.create_task(repeat(self.sweep, SWEEP_INTERVAL_S, "old events are not deleted yet"))

    async def report_engine(self) -> None:
        """Write the events of adapters that the engine has loaded, evicted or struck since the last call."""
        try:
            stats = await self._services.engine.client.call(self._residency.question(), STATS_TIMEOUT_S)
        except (EngineUnavailable, TimeoutError):
            return
        if stats.changes:
            await self._services.call(self._residency.report, stats.changes)

    async def report_budgets(self) -> None:
        """Write the events of budgets that are nearly used up."""
        await self._services.call(self._budgets.check)

    async def sweep(self) -> None:
        """Delete old events."""
        await self._services.call(self._services.events.log.sweep, self._kept_days)
