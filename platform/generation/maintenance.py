"""Renews leases, recovers requests, deletes old counters and replays settlements in the background."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import structlog
from sqlalchemy.exc import SQLAlchemyError

from loramux.migrations.database import DATABASE_TROUBLE
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.database_health import DatabaseHealth
from loramux.platform.admission.reservation_rows import LEASE_US
from loramux.platform.generation.cold_loads import ColdLoads
from loramux.platform.generation.first_token_gate import FirstTokenGate
from loramux.platform.generation.running_requests import RunningRequests
from loramux.platform.generation.settler import Settler
from loramux.platform.telemetry.package_metrics import GenerationMetrics

TEND_INTERVAL_S = 1.0
"""Interval between retries of a failing database and of spooled settlements, in seconds."""

RECOVERY_GRACE_S = LEASE_US / 1_000_000
"""How long recovery waits after database trouble and after the start, in seconds, so that gateways can checkpoint and
settle first.
"""

CHECKPOINT_INTERVAL_S = 5.0

SWEEP_INTERVAL_S = 3600.0
"""Interval between deletions of old daily and monthly quota counters, in seconds."""

log = structlog.get_logger()


class Call(Protocol):
    """Runs a blocking function on a thread."""

    def __call__(self, function: Callable[..., Any], *args: Any) -> Awaitable[Any]: ...


class Maintenance:
    """Renews the leases of the requests in `running`, and cleans up after dead gateways and database failures.

    If `is_alone`, no other server can use the database.
    """

    def __init__(
        self,
        running: RunningRequests,
        admission: Admission,
        settler: Settler,
        cold_loads: ColdLoads,
        gate: FirstTokenGate,
        health: DatabaseHealth,
        metrics: GenerationMetrics,
        call: Call,
        clock: Callable[[], float] = time.monotonic,
        is_alone: bool = False,
    ) -> None:
        self._running = running
        self._admission = admission
        self._settler = settler
        self._cold_loads = cold_loads
        self._gate = gate
        self._health = health
        self._metrics = metrics
        self._call = call
        self._clock = clock
        self._is_alone = is_alone
        self._began_s = clock()

    async def run(self) -> None:
        """Loop forever: checkpoint requests, recover requests of dead gateways, roll up usage and replay the spool."""
        self._began_s = self._clock()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_leases())
            group.create_task(self._tend_database())
            group.create_task(self._cold_loads.follow())
            group.create_task(self._gate.follow())

    async def _keep_leases(self) -> None:
        sweep_s = time.monotonic()
        while True:
            try:
                with _mistakes_logged("a checkpoint or a recovery"):
                    # Without the checkpoint, recovery could end requests that this gateway runs.
                    await self.checkpoint()
                    if self._may_recover():
                        num_recovered = await self._call(self._admission.recover_expired)
                        self._metrics.recovered.inc(num_recovered)
                with _mistakes_logged("adding usage to the rollups"):
                    await self._call(self._admission.roll_up)
                with _mistakes_logged("deleting old counters"):
                    if time.monotonic() >= sweep_s:
                        num_swept = await self._call(self._admission.sweep_counters)
                        # If any counters were swept, there may be more.
                        sweep_s = time.monotonic() + (0 if num_swept else SWEEP_INTERVAL_S)
            except DATABASE_TROUBLE as error:
                log.warning("checkpoint failed; trying again", error=str(error))
            await asyncio.sleep(CHECKPOINT_INTERVAL_S)

    def _may_recover(self) -> bool:
        """Return whether every healthy gateway has had time to renew its leases, so that recovery is safe. A new
        process does not know how long the database has been well, but without other servers, only dead gateways have
        not renewed theirs.
        """
        well_for_s = self._health.well_for_s
        if not self._is_alone:
            well_for_s = min(well_for_s, self._clock() - self._began_s)
        return not self._settler.is_behind and well_for_s > RECOVERY_GRACE_S

    async def _tend_database(self) -> None:
        while True:
            try:
                await self._settler.spool_held()
                if self._health.has_failed:
                    await self._call(self._admission.probe)
                    self._health.note_well()
                    log.info("the database accepts writes again")
                if self._settler.has_waiting and self._health.trouble is None:
                    await self._settler.replay()
            except (SQLAlchemyError, OSError) as error:
                log.warning("the database or the spool is in trouble; trying again", error=type(error).__name__)
            except Exception:
                log.exception("tending the database failed; trying again")
            await asyncio.sleep(TEND_INTERVAL_S)

    async def checkpoint(self) -> None:
        """Record every request's progress, extend its lease, and end requests whose cancellation was requested."""
        checkpoints = [*self._running.checkpoints(), *self._settler.checkpoints()]
        if checkpoints:
            for request_id in await self._call(self._admission.checkpoint, checkpoints):
                self._running.cancel(request_id)


@contextmanager
def _mistakes_logged(step: str) -> Iterator[None]:
    """Log an error that ends a step, unless the database is in trouble, which would end the next step, too."""
    try:
        yield
    except DATABASE_TROUBLE:
        raise
    except Exception:
        log.exception(f"{step} failed; trying again")
