"""The requests that run in this gateway: started, checkpointed, settled, drained."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import structlog
from sqlalchemy.exc import SQLAlchemyError

from loramux.platform.admission import Admission
from loramux.platform.engine_client import EngineClient
from loramux.platform.generation import Generation, Plan
from loramux.platform.group_commit import GroupCommit
from loramux.platform.metrics import GatewayMetrics
from loramux.platform.model_tokenizer import ModelTokenizer
from loramux.platform.reservations import Checkpoint, Closing, Extension, Reservation, ReservationRequest, Settlement

SETTLE_DELAYS_S = (0.2, 1.0, 3.0)
"""Waits between attempts to settle; after the last, the reservation is recovered when its lease has expired."""

CHECKPOINT_INTERVAL_S = 5.0

log = structlog.get_logger()


class Call(Protocol):
    """Runs a blocking function on a thread."""

    def __call__(self, function: Callable[..., Any], *args: Any) -> Awaitable[Any]: ...


class LiveRequests(Protocol):
    """The requests that a gateway in this process runs; asked on its event loop."""

    def progress(self) -> Mapping[str, int]:
        """Tokens received so far, by request."""

    def cancel(self, request_id: str) -> bool:
        """End a request at once; False where it is not run here."""


class NoLiveRequests:
    """For a process without a gateway."""

    def progress(self) -> Mapping[str, int]:
        return {}

    def cancel(self, request_id: str) -> bool:
        return False


class RunningRequests:
    """Owns the task of every admitted request until it is settled. `maintain` must run beside the server."""

    def __init__(
        self,
        admission: Admission,
        commit: GroupCommit,
        engine: EngineClient,
        tokenizer: ModelTokenizer,
        metrics: GatewayMetrics,
        call: Call,
        clock: Callable[[], int],
    ) -> None:
        self._admission = admission
        self._commit = commit
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._call = call
        self._clock = clock
        self._tasks: dict[asyncio.Task[None], Generation] = {}
        self._unrun: set[asyncio.Future[None]] = set()

    @property
    def num_running(self) -> int:
        return len(self._tasks)

    async def reserve(self, plan: Plan) -> Reservation:
        """Hold what the request may cost; raises QuotaExceeded or RequestTooLarge."""
        adapter = plan.model.adapter
        request = ReservationRequest(
            request_id=plan.request_id,
            tenant_id=plan.tenant_id,
            api_key_id=plan.principal.key_id,
            model=plan.model.name,
            adapter_version_id=adapter.version_id if adapter is not None else None,
            endpoint=plan.endpoint,
            prompt_tokens=plan.prompt_tokens,
            reserved_tokens=plan.reserved_tokens,
            base=plan.base,
            end_user=plan.end_user,
        )
        # Shielded: a reservation that commits while its client leaves must still be settled by someone.
        reserving = self._commit.submit(request)
        try:
            reservation: Reservation = await asyncio.shield(reserving)
        except asyncio.CancelledError:
            reserving.add_done_callback(lambda done: self._settle_unrun(plan.request_id, done))
            raise
        return reservation

    def start(self, plan: Plan) -> Generation:
        """Run a reserved request; it is settled whatever becomes of its client."""
        gaps = self._metrics.token_gap_seconds.labels(plan.endpoint)
        generation = Generation(
            plan, self._engine, self._tokenizer, self._settle, self._extend, self._clock, gaps.observe
        )
        task = asyncio.create_task(generation.run(), name=plan.request_id)
        self._tasks[task] = generation
        self._metrics.running.inc()
        task.add_done_callback(self._forget)
        return generation

    def progress(self) -> Mapping[str, int]:
        """Tokens received so far, by request."""
        return {generation.plan.request_id: generation.num_received for generation in self._tasks.values()}

    def cancel(self, request_id: str) -> bool:
        """End a request for an administrator; what was committed is paid for. False where it is not run here."""
        for generation in self._tasks.values():
            if generation.plan.request_id == request_id:
                generation.cancel()
                return True
        return False

    async def maintain(self) -> None:
        """Checkpoint what runs and recover what a dead gateway left, for ever."""
        while True:
            try:
                await self.checkpoint()
                num_recovered = await self._call(self._admission.recover_expired)
                self._metrics.recovered.inc(num_recovered)
            except SQLAlchemyError as error:
                log.warning("checkpoint failed; trying again", error=str(error))
            await asyncio.sleep(CHECKPOINT_INTERVAL_S)

    async def checkpoint(self) -> None:
        """Write down how far every running request is, extend its lease, and end those that are to be cancelled."""
        checkpoints = [Checkpoint(item.plan.request_id, item.num_received) for item in self._tasks.values()]
        if checkpoints:
            for request_id in await self._call(self._admission.checkpoint, checkpoints):
                self.cancel(request_id)

    async def drain(self, timeout_s: float) -> bool:
        """Wait until every request is settled; False when some still run after `timeout_s`."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        return not self._tasks

    async def _settle(self, request_id: str, settlement: Settlement) -> None:
        """Settle, again and again while the database is in trouble; a second settlement changes nothing."""
        for delay_s in (*SETTLE_DELAYS_S, None):
            try:
                # False: an earlier attempt of ours went through, and only its answer was lost.
                await self._commit.submit(Closing(request_id=request_id, settlement=settlement))
            except SQLAlchemyError as error:
                log.warning("settling failed", request_id=request_id, error=str(error))
                if delay_s is not None:
                    await asyncio.sleep(delay_s)
            else:
                self._metrics.count_settlement(settlement)
                return
        self._metrics.settle_failures.inc()
        log.error("a request could not be settled; it will be recovered", request_id=request_id, spent=settlement)

    async def _extend(self, request_id: str, tokens: int) -> bool:
        """Hold more tokens for a request; False where it may have no more."""
        try:
            return bool(await self._commit.submit(Extension(request_id=request_id, tokens=tokens)))
        except SQLAlchemyError as error:
            log.warning("extending failed", request_id=request_id, error=str(error))
            return False

    def _settle_unrun(self, request_id: str, reserving: asyncio.Future[Any]) -> None:
        if reserving.cancelled() or reserving.exception() is not None:
            return
        never = Settlement(status="aborted", prompt_tokens=0, completion_tokens=0, has_run=False)
        settling = asyncio.ensure_future(self._settle(request_id, never))
        self._unrun.add(settling)
        settling.add_done_callback(self._unrun.discard)

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._metrics.running.dec()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request's task failed", request_id=task.get_name(), exc_info=error)
