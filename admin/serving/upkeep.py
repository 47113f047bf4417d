"""Periodic background work: reporting the server's state, restoring pins after an engine restart, deleting copies of
purged weights, sweeping expired rows, rolling back aliases whose new versions fail.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from math import inf

import structlog
from sqlalchemy.exc import SQLAlchemyError

from loramux.adapter_store.registry.base_servers import OwnServer
from loramux.admin.rest.purging import forget_copies
from loramux.admin.rest.services import AdminServices
from loramux.admin.serving.expired_rows import ExpiredRows
from loramux.engine.protocol.messages import Pin, StatsRequest
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.evals.canaries import Canaries

LOOK_INTERVAL_S = 5.0
REPORT_INTERVAL_S = 10.0
"""Must be well below `SILENT_S` of `base_servers`."""
SWEEP_INTERVAL_S = 600.0
PURGE_INTERVAL_S = 30.0
FORGET_AGAIN_S = 3600.0
"""Time after which a server deletes its copies of purged weights once more, in seconds. A download that was running at
the first time has finished by then.
"""
STATS_TIMEOUT_S = 5.0
PIN_TIMEOUT_S = 30.0

log = structlog.get_logger(__name__)


class Upkeep:
    """Runs the periodic work alongside the admin app. Several servers on one database can run it concurrently."""

    def __init__(self, services: AdminServices) -> None:
        self._services = services
        self._expired = ExpiredRows(services.database)
        self._canaries = Canaries(
            services.database, services.adapters.registry, services.adapters.aliases, services.metrics.evals
        )
        self._unpinnable: frozenset[str] = frozenset()
        """Digests that the last attempt could not pin. Their failures are not logged again."""
        self._forgotten_s: dict[str, float] = {}
        """When the copies of purged weights were deleted, by digest. Infinity after the second time."""

    async def run(self, own: OwnServer, draining: asyncio.Event) -> None:
        """Run until cancelled. `draining` is set when the server starts to drain."""
        async with asyncio.TaskGroup() as group:
            # Reports have their own task, because restoring pins can take minutes.
            group.create_task(self._report(own, draining))
            group.create_task(self._look())

    async def _report(self, own: OwnServer, draining: asyncio.Event) -> None:
        while True:
            is_draining = draining.is_set()
            try:
                await self._services.call(own.report, is_draining)
            except SQLAlchemyError as error:
                log.warning("the server cannot report its state; trying again", error=str(error))
            if is_draining:
                await asyncio.sleep(REPORT_INTERVAL_S)
                continue
            # Report immediately when the drain begins.
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_INTERVAL_S):
                    await draining.wait()

    async def _look(self) -> None:
        swept_s, looked_s = -SWEEP_INTERVAL_S, -PURGE_INTERVAL_S
        while True:
            try:
                await self._services.call(self._canaries.check)
                await self.renew_pins()
                if time.monotonic() - looked_s >= PURGE_INTERVAL_S:
                    await self.forget_purged()
                    looked_s = time.monotonic()
                if time.monotonic() - swept_s >= SWEEP_INTERVAL_S:
                    await self._sweep()
                    swept_s = time.monotonic()
            except SQLAlchemyError as error:
                log.warning("upkeep failed; trying again", error=str(error))
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def _sweep(self) -> None:
        services = self._services
        await services.call(self._expired.sweep)
        await services.call(services.accounts.api_keys.restart_grace_periods)
        await services.call(services.database.refresh_statistics)

    async def forget_purged(self) -> None:
        """Delete this server's copies of weights that have been purged, here or on another server."""
        services, now_s = self._services, time.monotonic()
        purged = await services.call(services.adapters.ingest.purged_blobs.digests)
        # Weights that a version has again are no longer listed. If they are purged again, they are new here.
        self._forgotten_s = {digest: at_s for digest, at_s in self._forgotten_s.items() if digest in purged}
        due = [digest for digest in sorted(purged) if now_s - self._forgotten_s.get(digest, -inf) >= FORGET_AGAIN_S]
        if due and await forget_copies(services, due):
            for digest in due:
                self._forgotten_s[digest] = inf if digest in self._forgotten_s else now_s

    async def renew_pins(self) -> None:
        """Pin the adapters that should be pinned but are not, for example after an engine restart."""
        services = self._services
        wanted = await services.call(services.adapters.pins.digests)
        if not wanted:
            return
        failed = set()
        try:
            stats = await services.engine.client.call(StatsRequest(), STATS_TIMEOUT_S)
            for digest in sorted(wanted - {one.digest for one in stats.adapters if one.is_pinned}):
                state = await services.engine.client.call(Pin(digest=digest), PIN_TIMEOUT_S)
                if state.state == "failed":
                    failed.add(digest)
                    if digest not in self._unpinnable:
                        log.warning("an adapter cannot be pinned", digest=digest, code=state.code)
        except (EngineUnavailable, TimeoutError):
            return
        self._unpinnable = frozenset(failed)
