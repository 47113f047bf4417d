"""The requests that run in this gateway: started, checkpointed, settled, drained."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import structlog
from sqlalchemy.exc import SQLAlchemyError

from loramux.platform.admission import Admission
from loramux.platform.database_state import TROUBLE, DatabaseState, DatabaseTrouble
from loramux.platform.engine_client import EngineClient
from loramux.platform.generation import Generation, Plan
from loramux.platform.group_commit import CommitterClosed, GroupCommit
from loramux.platform.metrics import GatewayMetrics
from loramux.platform.model_tokenizer import ModelTokenizer
from loramux.platform.reservation_rows import LEASE_US
from loramux.platform.reservations import Checkpoint, Closing, Extension, Reservation, ReservationRequest, Settlement
from loramux.platform.resident_adapters import ResidentAdapters
from loramux.platform.settlement_spool import SettlementSpool, SpoolFull

SETTLE_DELAYS_S = (0.2, 1.0, 3.0)
"""Waits between attempts to settle where nothing is spooled; after the last, the reservation is left to recovery."""

SETTLE_WAIT_S = 2.0
"""How long a settlement may be under way before it is spooled too."""

RESERVE_WAIT_S = 5.0
"""How long a request waits for its reservation."""

TEND_INTERVAL_S = 1.0
"""How often a database in trouble is tried again, and what was spooled is looked for."""

RECOVERY_GRACE_S = LEASE_US / 1_000_000
"""After trouble, gateways first get a lease's time to say what runs and what was settled."""

CHECKPOINT_INTERVAL_S = 5.0

SWEEP_INTERVAL_S = 3600.0
"""How often counters of windows long past are looked for."""

REPLAY_AT_ONCE = 256

NEVER_RAN = Settlement(status="aborted", prompt_tokens=0, completion_tokens=0, has_run=False, has_begun=False)

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
        state: DatabaseState | None = None,
        spool: SettlementSpool | None = None,
    ) -> None:
        self._state = state if state is not None else DatabaseState()
        self._spool = spool
        # One thread of its own: the others may all wait for the database.
        self._spooling = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._admission = admission
        self._commit = commit
        self._engine = engine
        self._residents = ResidentAdapters(engine)
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
        """Hold what the request may cost; raises QuotaExceeded, RequestTooLarge, and what is in TROUBLE."""
        self._state.check()
        adapter = plan.model.adapter
        if adapter is None:
            return await self._reserve(plan, loads_adapter=False)
        try:
            # Whoever waits for its turn waits no longer than one that has it.
            async with (
                asyncio.timeout(RESERVE_WAIT_S),
                self._residents.admitting(plan.tenant_id, adapter.digest) as is_cold,
            ):
                self._state.check()
                return await self._reserve(plan, loads_adapter=is_cold)
        except TimeoutError:
            raise DatabaseTrouble("the reservation takes too long") from None

    async def _reserve(self, plan: Plan, *, loads_adapter: bool) -> Reservation:
        adapter = plan.model.adapter
        request = ReservationRequest(
            request_id=plan.request_id,
            tenant_id=plan.tenant_id,
            api_key_id=plan.principal.key_id,
            model=plan.model.name,
            adapter_version_id=adapter.version_id if adapter is not None else None,
            adapter_id=adapter.adapter_id if adapter is not None else None,
            endpoint=plan.endpoint,
            prompt_tokens=plan.prompt_tokens,
            reserved_tokens=plan.reserved_tokens,
            base=plan.base,
            end_user=plan.end_user,
            loads_adapter=loads_adapter,
        )
        # Shielded: a reservation that commits while its client leaves must still be settled by someone.
        reserving = self._commit.submit(request)
        try:
            reservation: Reservation = await asyncio.wait_for(asyncio.shield(reserving), RESERVE_WAIT_S)
        except asyncio.CancelledError:
            reserving.add_done_callback(lambda done: self._settle_unrun(plan.request_id, done))
            raise
        except TimeoutError:
            reserving.add_done_callback(lambda done: self._settle_unrun(plan.request_id, done))
            raise DatabaseTrouble("the reservation takes too long") from None
        except TROUBLE:
            # It may have been committed all the same, with only the answer lost.
            if self._spool is not None:
                await self._keep(Closing(request_id=plan.request_id, settlement=NEVER_RAN))
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
        """Checkpoint what runs, recover what a dead gateway left, roll up, and settle what was spooled, for ever."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_leases())
            group.create_task(self._tend_database())
            group.create_task(self._residents.follow())

    async def _keep_leases(self) -> None:
        sweep_s = time.monotonic()
        while True:
            try:
                await self.checkpoint()
                if self._may_recover():
                    num_recovered = await self._call(self._admission.recover_expired)
                    self._metrics.recovered.inc(num_recovered)
                await self._call(self._admission.roll_up)
                if time.monotonic() >= sweep_s:
                    num_swept = await self._call(self._admission.sweep_counters)
                    # Where there were some, there may be more.
                    sweep_s = time.monotonic() + (0 if num_swept else SWEEP_INTERVAL_S)
            except SQLAlchemyError as error:
                log.warning("checkpoint failed; trying again", error=str(error))
            await asyncio.sleep(CHECKPOINT_INTERVAL_S)

    def _may_recover(self) -> bool:
        """Not while gateways that are well may have been unable to say so."""
        is_settled = self._spool is None or self._spool.num_bytes == 0
        return is_settled and self._state.well_for_s > RECOVERY_GRACE_S

    async def _tend_database(self) -> None:
        """Find out when a database that failed takes writes again, and settle what was spooled meanwhile."""
        while True:
            try:
                if self._state.has_failed:
                    await self._call(self._admission.probe)
                    self._state.note_well()
                    log.info("the database takes writes again")
                if self._spool is not None and self._spool.num_bytes and self._state.trouble is None:
                    await self.replay()
            except (SQLAlchemyError, OSError) as error:
                log.warning("the database or the spool is in trouble; trying again", error=type(error).__name__)
            await asyncio.sleep(TEND_INTERVAL_S)

    async def replay(self) -> None:
        """Settle what was spooled; what cannot be settled now stays for the next time."""
        assert self._spool is not None
        loop = asyncio.get_running_loop()
        contents = await loop.run_in_executor(self._spooling, self._spool.begin_replay)
        refused = []
        for start in range(0, len(contents.closings), REPLAY_AT_ONCE):
            closings = contents.closings[start : start + REPLAY_AT_ONCE]
            outcomes = await asyncio.gather(*map(self._commit.submit, closings), return_exceptions=True)
            for closing, outcome in zip(closings, outcomes, strict=True):
                if isinstance(outcome, (*TROUBLE, CommitterClosed)):
                    return
                # Nothing was reserved where only the answer seemed lost; any other exception is the record's own fault.
                if isinstance(outcome, BaseException) and closing.settlement.has_run:
                    log.error("a spooled settlement was refused", request_id=closing.request_id, error=repr(outcome))
                    refused.append(closing)
        await loop.run_in_executor(self._spooling, self._spool.end_replay, refused)
        log.info("spooled settlements are in the ledger", count=len(contents.closings), refused=len(refused))

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
        """Settle in the database, or on the disk while the database is in trouble; twice changes nothing."""
        closing = Closing(request_id=request_id, settlement=settlement)
        is_settled = await self._settle_now(closing) or (self._spool is not None and await self._keep(closing))
        if not is_settled:
            is_settled = await self._settle_stubbornly(closing)
        if is_settled:
            self._metrics.count_settlement(settlement)
            return
        self._metrics.settle_failures.inc()
        log.error("a request could not be settled; it will be recovered", request_id=request_id, spent=settlement)

    async def _settle_now(self, closing: Closing) -> bool:
        """Whether the database took it, or had it already."""
        if self._state.trouble is not None and self._spool is not None:
            return False
        settling = self._commit.submit(closing)
        try:
            # Shielded: what takes too long is spooled as well, and the second of the two changes nothing.
            wait_s = SETTLE_WAIT_S if self._spool is not None else None
            await asyncio.wait_for(asyncio.shield(settling), wait_s)
        except TimeoutError:
            settling.add_done_callback(_look_away)
            return False
        except (SQLAlchemyError, CommitterClosed) as error:
            log.warning("settling failed", request_id=closing.request_id, error=str(error))
            return False
        return True

    async def _settle_stubbornly(self, closing: Closing) -> bool:
        """Try again and again: there is no spool, or it takes no more."""
        for delay_s in SETTLE_DELAYS_S:
            await asyncio.sleep(delay_s)
            try:
                await self._commit.submit(closing)
            except CommitterClosed:
                return False
            except SQLAlchemyError as error:
                log.warning("settling failed", request_id=closing.request_id, error=str(error))
            else:
                return True
        return False

    async def _keep(self, closing: Closing) -> bool:
        """Put a settlement on the disk; False where that failed as well."""
        assert self._spool is not None
        try:
            await asyncio.get_running_loop().run_in_executor(self._spooling, self._spool.append, closing)
        except (SpoolFull, OSError) as error:
            log.error("THE SPOOL OF SETTLEMENTS TAKES NO MORE", request_id=closing.request_id, error=str(error))
            return False
        return True

    def close(self) -> None:
        """End the thread of the spool, once nothing is settled any more."""
        self._spooling.shutdown()

    async def _extend(self, request_id: str, tokens: int) -> bool:
        """Hold more tokens for a request; False where it may have no more."""
        try:
            return bool(await self._commit.submit(Extension(request_id=request_id, tokens=tokens)))
        except (SQLAlchemyError, CommitterClosed) as error:
            log.warning("extending failed", request_id=request_id, error=str(error))
            return False

    def _settle_unrun(self, request_id: str, reserving: asyncio.Future[Any]) -> None:
        if reserving.cancelled() or reserving.exception() is not None:
            return
        settling = asyncio.ensure_future(self._settle(request_id, NEVER_RAN))
        self._unrun.add(settling)
        settling.add_done_callback(self._unrun.discard)

    def _forget(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._metrics.running.dec()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request's task failed", request_id=task.get_name(), exc_info=error)


def _look_away(done: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more; its exception, if any, is not to be reported as forgotten."""
    if not done.cancelled():
        done.exception()
