"""Settles requests in the database, or keeps settlements on disk or in memory until the database accepts them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy.exc import DataError, IntegrityError

from loramux.migrations.database import DATABASE_TROUBLE
from loramux.platform.admission.database_health import DatabaseHealth
from loramux.platform.admission.group_commit import CommitterClosed, GroupCommit
from loramux.platform.admission.records import Closing, RequestCheckpoint
from loramux.platform.generation.settlement_spool import SettlementSpool, SpoolFull, record_of
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.telemetry.package_metrics import GenerationMetrics

SETTLE_WAIT_S = 2.0
"""A settlement that takes longer than this in the database, in seconds, is also spooled."""

REPLAY_AT_ONCE = 256

MAX_TRIES = 5
"""Number of replays after which a settlement that fails for an unknown reason is set aside."""

NEVER_RAN = Settlement(status="aborted", prompt_tokens=0, completion_tokens=0, has_run=False, has_begun=False)

log = structlog.get_logger()


class Settler:
    """Closes reservations, even while the database is failing.

    A settlement that the database does not accept waits in the spool, or in memory if the spool does not accept it
    either. While any settlement waits in memory, no request is admitted. The number of settlements in memory is
    therefore bounded by the number of reservations that were open or in progress when the trouble began.
    """

    def __init__(
        self,
        commit: GroupCommit,
        metrics: GenerationMetrics,
        health: DatabaseHealth,
        spool: SettlementSpool | None = None,
    ) -> None:
        self._commit = commit
        self._metrics = metrics
        self._health = health
        self._spool = spool
        # The spool has its own thread, because all other threads may be waiting for the database.
        self._spooling = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._unrun: set[asyncio.Future[None]] = set()
        self._held: dict[str, Closing] = {}
        self._none_is_held = asyncio.Event()
        self._none_is_held.set()
        # Settlements that failed for an unknown reason: how often each did, and those that the last replay spooled
        # again.
        self._num_tries: dict[str, int] = {}
        self._again: tuple[Closing, ...] = ()
        self._is_closed = False

    async def settle(self, request_id: str, settlement: Settlement) -> None:
        """Settle in the database, or keep the settlement on disk or in memory. Settling twice changes nothing."""
        closing = Closing(request_id=request_id, settlement=settlement)
        is_kept = False
        try:
            is_kept = await self._settle_now(closing) or await self._spool_one(closing)
        finally:
            if is_kept:
                self._count(settlement)
            else:
                self._hold(closing)

    def settle_unrun(self, request_id: str, reserving: asyncio.Future[Any]) -> None:
        """Release the reservation of an abandoned request once the future `reserving` is done, unless it shows that
        none was made.
        """
        settling = asyncio.ensure_future(self._settle_unrun(request_id, reserving))
        self._unrun.add(settling)
        settling.add_done_callback(self._unrun.discard)

    async def _settle_unrun(self, request_id: str, reserving: asyncio.Future[Any]) -> None:
        await asyncio.wait([reserving])
        error = None if reserving.cancelled() else reserving.exception()
        if reserving.cancelled() or not (error is None or isinstance(error, DATABASE_TROUBLE)):
            return
        await (self.settle(request_id, NEVER_RAN) if error is None else self.spool_unrun(request_id))

    async def spool_unrun(self, request_id: str) -> None:
        """Spool the release of a reservation that the database may have made before its answer was lost."""
        closing = Closing(request_id=request_id, settlement=NEVER_RAN)
        is_kept = False
        try:
            is_kept = await self._spool_one(closing)
        finally:
            if not is_kept:
                self._hold(closing)

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def has_waiting(self) -> bool:
        return bool(self._held) or (self._spool is not None and self._spool.num_bytes > 0)

    @property
    def is_behind(self) -> bool:
        """Whether settlements wait that have not been replayed yet. Their requests must not be recovered."""
        num_bytes = 0 if self._spool is None else self._spool.num_bytes
        return bool(self._held) or num_bytes > sum(len(record_of(closing)) for closing in self._again)

    @property
    def trouble(self) -> str | None:
        """Why no request can be admitted now, in one line for operators. None if requests can be admitted."""
        if not self._held:
            return None
        return f"{len(self._held)} settlements are waiting in memory: neither the database nor the spool accepts them"

    def checkpoints(self) -> list[RequestCheckpoint]:
        """Return checkpoints for the requests whose settlements wait in memory. They extend these requests' leases
        while the database accepts checkpoints but no settlements.
        """
        return [RequestCheckpoint(one.request_id, one.settlement.completion_tokens) for one in self._held.values()]

    async def none_held(self) -> None:
        """Wait until no settlement is left in memory and no abandoned request is left to be released."""
        while self._unrun:
            await asyncio.wait(set(self._unrun))
        await self._none_is_held.wait()

    async def spool_held(self) -> None:
        """Move settlements from memory to the spool until none is left or the spool does not accept one."""
        for closing in tuple(self._held.values()):
            if not await self._spool_one(closing):
                return
            self._release(closing)

    async def replay(self) -> None:
        """Write the settlements in memory and on disk to the database. If the database fails, they
        keep waiting.

        Raises OSError if the disk fails, which delays only the settlements on disk.
        """
        held = tuple(self._held.values())
        outcome = await self._settle_all(held)
        if outcome is None:
            return
        loop = asyncio.get_running_loop()
        if outcome.refused and self._spool is not None:
            try:
                await loop.run_in_executor(self._spooling, self._spool.set_aside, outcome.refused)
            except OSError as error:
                # They are in the log, and must not keep requests from being admitted.
                log.error("the refused settlements could not be written to the spool", error=str(error))
        for closing in held:
            if closing not in outcome.still_held:
                self._release(closing, is_settled=closing not in outcome.refused)
        self._note_settled(held, outcome)
        if self._spool is None or self._spool.num_bytes == 0:
            return
        contents = await loop.run_in_executor(self._spooling, self._spool.begin_replay)
        outcome = await self._settle_all(contents.closings)
        if outcome is None:
            return
        await loop.run_in_executor(self._spooling, self._spool.end_replay, outcome.refused)
        self._note_settled(contents.closings, outcome)

    def close(self) -> None:
        """Stop the spool's thread, and log in full every settlement that is still in memory."""
        self._is_closed = True
        self._spooling.shutdown()
        for closing in tuple(self._held.values()):
            self._give_up(closing)

    async def _settle_all(self, closings: Sequence[Closing]) -> _Outcome | None:
        """Settle the closings, and log those that are to be set aside. Those that failed for an unknown reason are
        spooled again, behind the waiting ones, or stay in memory if they are there and the spool does not accept them.

        Return None if the database is failing.
        """
        refused: dict[Closing, BaseException] = {}
        failed: dict[Closing, BaseException] = {}
        for start in range(0, len(closings), REPLAY_AT_ONCE):
            some = closings[start : start + REPLAY_AT_ONCE]
            outcomes = await asyncio.gather(*map(self._commit.submit, some), return_exceptions=True)
            for closing, outcome in zip(some, outcomes, strict=True):
                if isinstance(outcome, (*DATABASE_TROUBLE, CommitterClosed)):
                    return None
                if isinstance(outcome, BaseException) and not _is_refusal(outcome):
                    failed[closing] = outcome
                    continue
                self._num_tries.pop(closing.request_id, None)
                # A request that never ran may have no reservation, so its refusal is not an error.
                if isinstance(outcome, BaseException) and closing.settlement.has_run:
                    refused[closing] = outcome
        again, still_held = [], []
        for closing, error in failed.items():
            num_tries = self._num_tries.pop(closing.request_id, 0) + 1
            if num_tries < MAX_TRIES and await self._spool_one(closing):
                again.append(closing)
            elif num_tries < MAX_TRIES and closing.request_id in self._held:
                still_held.append(closing)
            else:
                refused[closing] = error
                continue
            log.error("a settlement failed; trying again", request_id=closing.request_id, error=repr(error))
            self._num_tries[closing.request_id] = num_tries
        self._again = tuple(again)
        for closing, error in refused.items():
            log.error("a settlement was refused or failed too often", error=repr(error), **_in_full(closing))
        return _Outcome(list(refused), still_held)

    def _note_settled(self, closings: Sequence[Closing], outcome: _Outcome) -> None:
        num_refused = len(outcome.refused)
        self._metrics.settle_failures.inc(num_refused)
        count = len(closings) - num_refused - len(outcome.still_held) - len(self._again)
        if count or num_refused:
            log.info("waiting settlements were written to the ledger", count=count, refused=num_refused)

    async def _settle_now(self, closing: Closing) -> bool:
        """Settle in the database. Return whether the database accepted or already had the settlement."""
        if self._health.trouble is not None:
            return False
        settling = self._commit.submit(closing)
        try:
            # Shield the commit: a slow settlement is also spooled, and the later of the two writes has no effect.
            async with asyncio.timeout(SETTLE_WAIT_S):
                await asyncio.shield(settling)
        except TimeoutError:
            settling.add_done_callback(_retrieve_exception)
            return False
        except Exception as error:
            # The settlement must not be lost. A replay will show whether the database refuses it.
            log.warning("settling failed", request_id=closing.request_id, error=str(error))
            return False
        return True

    async def _spool_one(self, closing: Closing) -> bool:
        """Store a settlement on disk. Return False if that fails or there is no spool."""
        if self._spool is None:
            return False
        try:
            await asyncio.get_running_loop().run_in_executor(self._spooling, self._spool.append, closing)
        except (SpoolFull, OSError) as error:
            log.error("THE SETTLEMENT SPOOL ACCEPTS NO MORE RECORDS", request_id=closing.request_id, error=str(error))
            return False
        return True

    def _hold(self, closing: Closing) -> None:
        self._held[closing.request_id] = closing
        self._none_is_held.clear()
        if self._is_closed:
            self._give_up(closing)

    def _release(self, closing: Closing, *, is_settled: bool = True) -> None:
        del self._held[closing.request_id]
        if is_settled:
            self._count(closing.settlement)
        if not self._held:
            self._none_is_held.set()

    def _count(self, settlement: Settlement) -> None:
        if settlement.has_begun:
            self._metrics.count_settlement(settlement)

    def _give_up(self, closing: Closing) -> None:
        self._metrics.settle_failures.inc()
        log.error(
            "the gateway stopped before it wrote this settlement: add the record to DATA_DIR/spool/replaying.jsonl",
            **_in_full(closing),
        )


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a replay did not settle and did not spool again."""

    refused: list[Closing]
    """The database refuses them, or they failed MAX_TRIES times."""
    still_held: list[Closing]
    """They stay in memory and are tried again."""


def _is_refusal(outcome: BaseException) -> bool:
    """Return whether the database will never accept the settlement: it has no such request, or its rules forbid the
    row. Subclasses of LookupError, such as KeyError, are mistakes of ours.
    """
    return type(outcome) is LookupError or isinstance(outcome, (IntegrityError, DataError))


def _in_full(closing: Closing) -> dict[str, str]:
    return {"request_id": closing.request_id, "record": record_of(closing).decode().rstrip()}


def _retrieve_exception(done: asyncio.Future[Any]) -> None:
    """Retrieve the exception of an abandoned future, so that asyncio does not report it as unhandled."""
    if not done.cancelled():
        done.exception()
