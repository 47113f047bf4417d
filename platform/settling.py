"""Requests settled: in the database, or on the disk until the database takes them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import structlog
from sqlalchemy.exc import SQLAlchemyError

from loramux.platform.database_state import TROUBLE, DatabaseState
from loramux.platform.group_commit import CommitterClosed, GroupCommit
from loramux.platform.metrics import GatewayMetrics
from loramux.platform.reservations import Closing, Settlement
from loramux.platform.settlement_spool import SettlementSpool, SpoolFull

SETTLE_DELAYS_S = (0.2, 1.0, 3.0)
"""Waits between attempts to settle where nothing is spooled; after the last, the reservation is left to recovery."""

SETTLE_WAIT_S = 2.0
"""How long a settlement may be under way before it is spooled too."""

REPLAY_AT_ONCE = 256

NEVER_RAN = Settlement(status="aborted", prompt_tokens=0, completion_tokens=0, has_run=False, has_begun=False)

log = structlog.get_logger()


class Settling:
    """Closes reservations, whatever becomes of the database. Without a `spool`, some may be left to recovery."""

    def __init__(
        self, commit: GroupCommit, metrics: GatewayMetrics, state: DatabaseState, spool: SettlementSpool | None = None
    ) -> None:
        self._commit = commit
        self._metrics = metrics
        self._state = state
        self._spool = spool
        # One thread of its own: the others may all wait for the database.
        self._spooling = ThreadPoolExecutor(1, thread_name_prefix="spool")
        self._unrun: set[asyncio.Future[None]] = set()

    async def settle(self, request_id: str, settlement: Settlement) -> None:
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

    def settle_unrun(self, request_id: str, reserving: asyncio.Future[Any]) -> None:
        """Give back what `reserving`, which is done, may hold for a request that nobody waits for any more."""
        if reserving.cancelled() or reserving.exception() is not None:
            return
        settling = asyncio.ensure_future(self.settle(request_id, NEVER_RAN))
        self._unrun.add(settling)
        settling.add_done_callback(self._unrun.discard)

    async def spool_unrun(self, request_id: str) -> None:
        """Have a request's reservation given back later, should there be one; nothing where nothing is spooled."""
        if self._spool is not None:
            await self._keep(Closing(request_id=request_id, settlement=NEVER_RAN))

    @property
    def has_spooled(self) -> bool:
        """Whether settlements wait on the disk."""
        return self._spool is not None and self._spool.num_bytes > 0

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

    def close(self) -> None:
        """End the thread of the spool, once nothing is settled any more."""
        self._spooling.shutdown()

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


def _look_away(done: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more; its exception, if any, is not to be reported as forgotten."""
    if not done.cancelled():
        done.exception()
