"""Reserves, starts, cancels and drains this gateway's requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Protocol

import structlog
from sqlalchemy.exc import IntegrityError

from loramux.migrations.database import DATABASE_TROUBLE
from loramux.platform.accounts.tenants import DELETED
from loramux.platform.admission.database_health import DatabaseHealth, DatabaseTrouble
from loramux.platform.admission.group_commit import GroupCommit
from loramux.platform.admission.records import Extension, RequestCheckpoint, Reservation, ReservationRequest
from loramux.platform.engine_link.engine_client import EngineClient
from loramux.platform.errors import Unauthenticated
from loramux.platform.generation.cold_loads import ColdLoads
from loramux.platform.generation.first_token_gate import FirstTokenGate
from loramux.platform.generation.generation import Generation
from loramux.platform.generation.plan import Plan
from loramux.platform.generation.settler import Settler
from loramux.platform.telemetry.package_metrics import GenerationMetrics

RESERVE_WAIT_S = 5.0
"""Timeout for a request's reservation, in seconds."""

_FOREIGN_KEY = "23503"
"""PostgreSQL's SQLSTATE for a row that refers to a missing row."""

log = structlog.get_logger()


class LiveRequests(Protocol):
    """The running requests of this process's gateway. The methods must be called on the gateway's event loop."""

    def progress(self) -> Mapping[str, int]:
        """Number of tokens received so far, by request id."""

    def cancel(self, request_id: str) -> bool:
        """End a request immediately. Returns False if it is not running here."""


class NoLiveRequests:
    """The running requests of a process without a gateway: always empty."""

    def progress(self) -> Mapping[str, int]:
        return {}

    def cancel(self, request_id: str) -> bool:
        return False


class RunningRequests:
    """Owns the task of every admitted request until it is settled. `Maintenance` must run alongside."""

    def __init__(
        self,
        commit: GroupCommit,
        engine: EngineClient,
        metrics: GenerationMetrics,
        clock: Callable[[], int],
        health: DatabaseHealth,
        settler: Settler,
        cold_loads: ColdLoads,
        gate: FirstTokenGate,
    ) -> None:
        self._gate = gate
        self._health = health
        self._settler = settler
        self._commit = commit
        self._engine = engine
        self._cold_loads = cold_loads
        self._metrics = metrics
        self._clock = clock
        self._tasks: dict[asyncio.Task[None], Generation] = {}
        self._late: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    @property
    def num_awaited(self) -> int:
        """Number of requests, without those of batches, that have no token or pooled state yet."""
        return sum(not one.has_begun and not one.plan.is_background for one in self._tasks.values())

    def num_running_of(self, tenant_id: str) -> int:
        """Number of the tenant's requests that run on this server."""
        return sum(one.plan.target.tenant_id == tenant_id for one in self._tasks.values())

    async def reserve(self, plan: Plan) -> Reservation:
        """Reserve the maximum cost.

        Raises QuotaExceeded, RequestTooLarge, DatabaseTrouble, Unauthenticated if the tenant has been deleted, what
        `FirstTokenGate.enter` raises, or an exception in DATABASE_TROUBLE.
        """
        self._check()
        self._gate.enter(plan)
        try:
            return await self._admit(plan)
        except BaseException:
            self._gate.leave(plan.request_id)
            raise

    async def _admit(self, plan: Plan) -> Reservation:
        adapter, order = plan.adapter_to_load, plan.target.model.order
        if adapter is None:
            return await self._reserve(plan, loads_adapter=False)
        try:
            # The timeout also covers waiting for another request's cold load.
            async with asyncio.timeout(RESERVE_WAIT_S):
                return await self._cold_loads.admit(
                    plan.target.tenant_id,
                    adapter.digest,
                    partial(self._reserve, plan),
                    other_base=None if order is None else order.other,
                )
        except TimeoutError:
            raise DatabaseTrouble("the reservation took too long") from None

    def _check(self) -> None:
        """Raise DatabaseTrouble if requests cannot be reserved or settlements cannot be stored now."""
        self._health.check()
        trouble = self._settler.trouble
        if trouble is not None:
            raise DatabaseTrouble(trouble)

    async def _reserve(self, plan: Plan, loads_adapter: bool) -> Reservation:
        self._check()
        adapter = plan.target.model.adapter
        request = ReservationRequest(
            request_id=plan.request_id,
            tenant_id=plan.target.tenant_id,
            api_key_id=plan.target.api_key_id,
            model=plan.target.model.name,
            adapter_version_id=adapter.version_id if adapter is not None else None,
            adapter_id=adapter.adapter_id if adapter is not None else None,
            endpoint=plan.endpoint,
            prompt_tokens=plan.prompt_tokens,
            reserved_tokens=plan.reserved_tokens,
            # Without tokens to generate, no smaller max_tokens would fit into a quota.
            num_sequences=0 if plan.pooling is not None else plan.num_sequences,
            base=plan.base,
            end_user=plan.end_user,
            service_tier=plan.service_tier,
            loads_adapter=loads_adapter,
        )
        reserving = self._commit.submit(request)
        try:
            # Shielded, because a reservation that commits while its client disconnects must still be settled.
            async with asyncio.timeout(RESERVE_WAIT_S):
                reservation: Reservation = await asyncio.shield(reserving)
        except IntegrityError as error:
            if not _lacks_row(error):
                raise
            raise Unauthenticated(DELETED) from error
        except asyncio.CancelledError:
            self._settler.settle_unrun(plan.request_id, reserving)
            raise
        except TimeoutError:
            self._settler.settle_unrun(plan.request_id, reserving)
            raise DatabaseTrouble("the reservation took too long") from None
        except DATABASE_TROUBLE:
            # The reservation may have been committed although its answer was lost.
            await self._settler.spool_unrun(plan.request_id)
            raise
        return reservation

    def start(self, plan: Plan, life: Callable[[Generation], Coroutine[Any, Any, None]]) -> Generation:
        """Start `life`, which must run and settle the reserved request, in a separate task."""
        gaps = self._metrics.token_gaps.of(plan.endpoint)
        self._gate.send(plan.request_id)
        generation = Generation(
            plan,
            self._engine,
            self._extend,
            self._clock,
            gaps.observe,
            self._metrics.count_discarded,
            partial(self._gate.begin, plan.request_id),
        )
        task = asyncio.create_task(life(generation), name=plan.request_id)
        self._tasks[task] = generation
        self._metrics.running.inc()
        task.add_done_callback(self._forget)
        return generation

    def progress(self) -> Mapping[str, int]:
        return {generation.plan.request_id: generation.num_received for generation in self._tasks.values()}

    def checkpoints(self) -> list[RequestCheckpoint]:
        return [RequestCheckpoint(one.plan.request_id, one.num_checkpointed) for one in self._tasks.values()]

    def cancel(self, request_id: str) -> bool:
        """End a request for an administrator and charge committed tokens. Return False if it is not running here."""
        for generation in self._tasks.values():
            if generation.plan.request_id == request_id:
                generation.cancel()
                return True
        return False

    async def drain(self, timeout_s: float) -> bool:
        """Wait until every request is settled or its settlement is on disk. Return False after `timeout_s`.

        `Maintenance` must keep running, because it settles requests whose settlements wait in memory.
        """
        try:
            async with asyncio.timeout(timeout_s):
                if self._tasks:
                    await asyncio.wait(set(self._tasks))
                await self._settler.none_held()
        except TimeoutError:
            return False
        return not self._tasks

    async def _extend(self, request_id: str, tokens: int) -> bool:
        """Reserve more tokens for a request. Return False if no more are granted."""
        try:
            return bool(await self._commit.submit(Extension(request_id=request_id, tokens=tokens)))
        except Exception as error:
            log.warning("extending failed", request_id=request_id, error=str(error))
            return False

    def _forget(self, task: asyncio.Task[None]) -> None:
        generation = self._tasks.pop(task)
        self._gate.leave(generation.plan.request_id, generation.num_received, generation.usage.cached_tokens)
        for late in generation.late:
            self._late.add(late)
            late.add_done_callback(self._late.discard)
        self._metrics.running.dec()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request's task failed", request_id=task.get_name(), exc_info=error)


def _lacks_row(error: IntegrityError) -> bool:
    """True if a row refers to one that does not exist."""
    return getattr(error.orig, "sqlstate", None) == _FOREIGN_KEY or "FOREIGN KEY" in str(error.orig)
