"""Periodic background work: reporting the server's state, restoring pins after an engine restart, deleting copies of
purged weights and cached prefixes of deleted tenants, sweeping expired rows, rolling back aliases whose new versions
fail.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Generic, TypeVar

import structlog
from sqlalchemy.exc import SQLAlchemyError

from loramux.adapter_store.registry.base_servers import OwnServer
from loramux.admin.rest.purging import forget_copies, forget_prefixes
from loramux.admin.rest.services import AdminServices
from loramux.admin.server.background import repeat
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
"""Seconds after which a server deletes its copies of purged data a second time. A download or a request that was
running the first time has finished by then.
"""
STATS_TIMEOUT_S = 5.0
PIN_TIMEOUT_S = 30.0

log = structlog.get_logger(__name__)

NameT = TypeVar("NameT", str, bytes)


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
        self._unwanted: set[str] = set()
        """Digests of adapters that were pinned at the last look although no version needs it."""
        self._weights = _Copies[str]("weights", partial(forget_copies, services))
        self._prefixes = _Copies[bytes]("prefixes", partial(forget_prefixes, services))

    async def run(self, own: OwnServer, draining: asyncio.Event) -> None:
        """Run until cancelled. `draining` is set when the server starts to drain."""
        async with asyncio.TaskGroup() as group:
            # Separate tasks, because restoring pins can take minutes.
            group.create_task(self._report(own, draining))
            group.create_task(repeat(self.check_canaries, LOOK_INTERVAL_S, "canaries are not looked at"))
            group.create_task(repeat(self.renew_pins, LOOK_INTERVAL_S, "pins are not restored yet"))
            group.create_task(repeat(self.forget_purged, PURGE_INTERVAL_S, "copies of purged data are not deleted yet"))
            group.create_task(repeat(self.sweep, SWEEP_INTERVAL_S, "expired rows are not deleted yet"))

    async def _report(self, own: OwnServer, draining: asyncio.Event) -> None:
        while True:
            is_draining = draining.is_set()
            try:
                await self._services.call(own.report, is_draining)
            except SQLAlchemyError as error:
                log.warning("the server cannot report its state; trying again", error=str(error))
            except Exception:
                log.exception("the server cannot report its state; trying again")
            if is_draining:
                await asyncio.sleep(REPORT_INTERVAL_S)
                continue
            # Report immediately when the drain begins.
            with suppress(TimeoutError):
                async with asyncio.timeout(REPORT_INTERVAL_S):
                    await draining.wait()

    async def check_canaries(self) -> None:
        """Roll back the aliases whose new versions fail."""
        await self._services.call(self._canaries.check)

    async def sweep(self) -> None:
        """Delete expired rows."""
        services = self._services
        await services.call(self._expired.sweep)
        await services.call(services.accounts.api_keys.restart_grace_periods)
        await services.call(services.database.refresh_statistics)

    async def forget_purged(self) -> None:
        """Delete this server's copies of weights that have been purged, and of deleted tenants' K and V. It does not
        matter which server has purged them.
        """
        services = self._services
        # Weights that a version has again are not listed. If they are purged again, they are new here.
        await self._weights.forget(await services.call(services.adapters.ingest.purged_blobs.digests))
        await self._prefixes.forget(await services.call(services.accounts.tenants.deleted_keys))

    async def renew_pins(self) -> None:
        """Pin the adapters that should be pinned but are not, for example after an engine restart. Unpin those that
        should not be pinned any more, for example because another server was told to unpin them.
        """
        services = self._services
        wanted = await services.call(services.adapters.pins.digests)
        failed = set()
        try:
            stats = await services.engine.client.call(StatsRequest(), STATS_TIMEOUT_S)
            pinned = {one.digest for one in stats.adapters if one.is_pinned}
            # Another server, or a restart, may have left the pins of some engines only.
            unwanted = pinned.union(one.digest for one in stats.adapters if one.is_pinned_somewhere) - wanted
            # An engine pins an adapter before its row says so. Two looks in a row cannot both fall in between.
            for digest in sorted(unwanted & self._unwanted):
                await services.engine.client.call(Pin(digest=digest, is_pinned=False), PIN_TIMEOUT_S)
            self._unwanted = unwanted
            for digest in sorted(wanted - pinned):
                state = await services.engine.client.call(Pin(digest=digest), PIN_TIMEOUT_S)
                if state.state == "failed":
                    failed.add(digest)
                    if digest not in self._unpinnable:
                        log.warning("an adapter cannot be pinned", digest=digest, code=state.code)
        except (EngineUnavailable, TimeoutError):
            self._unwanted = set()
            return
        self._unpinnable = frozenset(failed)


class _Copies(Generic[NameT]):
    """Deletes this server's copies of purged objects, once and again after FORGET_AGAIN_S. `delete` takes names of
    objects, deletes their copies, and returns the names that have no copies left. The log calls the objects `kind`.
    """

    def __init__(self, kind: str, delete: Callable[[Sequence[NameT]], Awaitable[Sequence[NameT]]]) -> None:
        self._kind = kind
        self._delete: Callable[[Sequence[NameT]], Awaitable[Sequence[NameT]]] = delete
        self._deleted_s: dict[NameT, float] = {}
        """When copies were deleted, by name. Infinity after the second time."""
        self._is_late = False
        """True if the last attempt left some copies. Further failures are not logged."""

    async def forget(self, purged: Collection[NameT]) -> None:
        """Delete the copies that are due. Objects that are no longer in `purged` count as new if they return."""
        now_s = time.monotonic()
        self._deleted_s = {name: at_s for name, at_s in self._deleted_s.items() if name in purged}
        due = [name for name in sorted(purged) if now_s - self._deleted_s.get(name, -inf) >= FORGET_AGAIN_S]
        deleted = await self._delete(due) if due else ()
        for name in deleted:
            self._deleted_s[name] = inf if name in self._deleted_s else now_s
        num_due = len(due) - len(deleted)
        if num_due and not self._is_late:
            log.warning(
                "this server still holds purged data and will try again to delete it", kind=self._kind, num_due=num_due
            )
        self._is_late = num_due > 0
