"""Admission: reserves quota before a request runs, and settles it exactly once, when the actual usage is known."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import structlog
from sqlalchemy import Connection, bindparam, case, delete, insert, not_, select, tuple_, update

from loramux.migrations import schema
from loramux.migrations.database import DATABASE_TROUBLE, Database
from loramux.platform.admission.records import (
    RECOVERED,
    Closing,
    Extension,
    Operation,
    Outcome,
    RequestCheckpoint,
    Reservation,
    ReservationRequest,
)
from loramux.platform.admission.reservation_rows import LEASE_US
from loramux.platform.admission.transaction import MAX_ATTEMPTS, AdmissionTransaction, CountersMissing
from loramux.platform.ledger.price_list import PriceReader
from loramux.platform.ledger.rollups import MAX_BATCHES, UsageRollups
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.quotas.counter_rows import CounterRows
from loramux.platform.quotas.policy_cache import PolicyReader

log = structlog.get_logger(__name__)

_RECOVER_AT_ONCE = 100

KEPT_WINDOWS_US = 100 * 86_400_000_000
"""How long counters are kept after the start of their day or month, in microseconds."""

_SWEEP_AT_ONCE = 1000

_CHECKPOINT = (
    update(schema.reservations)
    .where(schema.reservations.c.id == bindparam("request_id"), schema.reservations.c.state == "open")
    .values(
        # A response in the background may have stored more since the gateway counted.
        checkpoint_tokens=case(
            (schema.reservations.c.checkpoint_tokens > bindparam("tokens"), schema.reservations.c.checkpoint_tokens),
            else_=bindparam("tokens"),
        ),
        lease_expires_us=bindparam("until_us"),
    )
)


class Admission:
    """Reserves, checkpoints, settles and recovers requests, on SQLite or PostgreSQL. Blocking.

    A gateway commits through `GroupCommit`, which puts many operations into one transaction. `note_overdrawn` receives
    the number of late settlements that overdrew a hard limit.
    """

    def __init__(self, database: Database, note_overdrawn: Callable[[int], None] = lambda _: None) -> None:
        self._database = database
        self._note_overdrawn = note_overdrawn
        self._policies = PolicyReader(database)
        self._prices = PriceReader(database)
        self._rollups = UsageRollups(database)
        self._turn = threading.Lock()
        self._recovered_to = ""

    @property
    def num_writers(self) -> int:
        """Number of transactions worth running concurrently.

        SQLite allows only one. PostgreSQL can execute one while the gateway checks the operations of the next.
        """
        return 1 if self._database.is_sqlite else 2

    def commit(self, operations: Sequence[Operation]) -> list[Outcome]:
        """Apply operations in one transaction, in the given order, and return the outcome of each.

        A refused operation charges nothing and does not affect the others. If SQLAlchemyError is raised, no operation
        has taken effect.
        """
        for _ in range(MAX_ATTEMPTS):
            try:
                with self._commit() as connection:
                    transaction = AdmissionTransaction(connection, self._database, self._policies, self._prices)
                    outcomes = transaction.apply(operations)
                if transaction.num_overdrawn:
                    self._note_overdrawn(transaction.num_overdrawn)
                return outcomes
            except CountersMissing as missing:
                # Inserting counters while holding locks on others could deadlock, so use a separate transaction.
                with self._write() as connection:
                    CounterRows(connection).make(missing.bindings)
        raise RuntimeError("quota policies change faster than they can be applied")

    def reserve(self, request: ReservationRequest) -> Reservation:
        """Reserve the request's maximum cost, or raise QuotaExceeded or RequestTooLarge and reserve nothing."""
        outcome = self._only(request)
        assert isinstance(outcome, Reservation)
        return outcome

    def extend(self, request_id: str, tokens: int) -> bool:
        """Reserve more tokens for a running request. Return False if a policy refuses the tokens or the request is
        already settled or recovered. Raises LookupError if there is no such request.
        """
        return bool(self._only(Extension(request_id=request_id, tokens=tokens)))

    def settle(self, request_id: str, settlement: Settlement) -> bool:
        """Charge the actual usage, release the rest and write the usage event.

        Return False if the request is already settled.

        If the reservation was recovered before, the difference is charged and written as an adjustment. The charge can
        exceed a limit, because the tokens have already been used. Raises LookupError if there is no such request.
        """
        return bool(self._only(Closing(request_id=request_id, settlement=settlement)))

    def checkpoint(self, checkpoints: Sequence[RequestCheckpoint]) -> list[str]:
        """Record the tokens delivered so far, extend the leases, and return the IDs of the requests to cancel.

        Reservations that are not open are ignored.
        """
        if not checkpoints:
            return []
        with self._write() as connection:
            lease_expires_us = self._database.now_us(connection) + LEASE_US
            # All gateways lock in the same order, so they never deadlock.
            ordered = sorted(checkpoints, key=lambda item: item.request_id)
            connection.execute(
                _CHECKPOINT,
                [
                    {"request_id": item.request_id, "tokens": item.completion_tokens, "until_us": lease_expires_us}
                    for item in ordered
                ],
            )
            table = schema.reservations
            wanted = {item.request_id for item in checkpoints}
            # Few requests are marked for cancellation. Reading all of them is cheaper than looking up each checkpointed
            # request.
            flagged = connection.execute(
                select(table.c.id).where(table.c.state == "open", table.c.cancel_requested_us.is_not(None))
            ).scalars()
            return [request_id for request_id in flagged if request_id in wanted]

    def recover_expired(self) -> int:
        """Settle a batch of reservations whose gateways seem dead, and return the number settled. The next call goes on
        with later reservations, so those that cannot be settled do not hold up others.

        The prompt and the last checkpoint's tokens are charged. A lease that ends more than two lease lengths ahead was
        written before the clock was set back, so it counts as expired.
        """
        table = schema.reservations
        with self._database.read() as connection:
            now_us = self._database.now_us(connection)
            is_held = table.c.lease_expires_us.between(now_us, now_us + 2 * LEASE_US)
            query = select(table).where(table.c.state == "open", not_(is_held), table.c.id > self._recovered_to)
            expired = connection.execute(query.order_by(table.c.id).limit(_RECOVER_AT_ONCE)).all()
        self._recovered_to = expired[-1].id if len(expired) == _RECOVER_AT_ONCE else ""
        closings = [
            Closing(
                request_id=row.id,
                settlement=Settlement(
                    status=RECOVERED, prompt_tokens=row.prompt_tokens, completion_tokens=row.checkpoint_tokens
                ),
                lease_expires_us=row.lease_expires_us,
            )
            for row in expired
        ]
        return sum(outcome is True for outcome in self._recover(closings)) if closings else 0

    def _recover(self, closings: Sequence[Closing]) -> list[Outcome]:
        """Commit the closings together, or each for itself if one of them fails."""
        try:
            return self.commit(closings)
        except DATABASE_TROUBLE:
            raise
        except Exception as error:
            if len(closings) == 1:
                log.error("a request cannot be recovered", request_id=closings[0].request_id, error=repr(error))
                return [error]
            return [outcome for closing in closings for outcome in self._recover([closing])]

    def sweep_counters(self) -> int:
        """Delete a batch of counters for long-past days and months, and return their number.

        Counters with reserved amounts are kept.
        """
        counters = schema.quota_counters
        key = (counters.c.policy_id, counters.c.subject_id, counters.c.window_start_us)
        with self._write() as connection:
            before_us = self._database.now_us(connection) - KEPT_WINDOWS_US
            # Counters without a window have a `window_start_us` of 0. The next sweep handles counters that another
            # transaction has locked.
            past = counters.c.window_start_us.between(1, before_us) & (counters.c.reserved == 0)
            some = select(*key).where(past).limit(_SWEEP_AT_ONCE).with_for_update(skip_locked=True)
            return connection.execute(delete(counters).where(tuple_(*key).in_(some))).rowcount

    def probe(self) -> None:
        """Check that the database accepts a write. Raises SQLAlchemyError if it does not."""
        signals = schema.signals
        with self._write() as connection:
            counted = update(signals).where(signals.c.name == "probe").values(value=signals.c.value + 1)
            if connection.execute(counted).rowcount == 0:
                connection.execute(insert(signals).values(name="probe", value=1))

    def roll_up(self) -> int:
        """Add recent settlements to the rollups, and return the number of settlement transactions added."""
        total = 0
        while True:
            # Take the committer's lock: the committer then waits for one short update instead of polling SQLite's lock.
            with self._turn if self._database.is_sqlite else nullcontext():
                folded = self._rollups.fold()
            total += folded
            if folded < MAX_BATCHES:
                return total

    def _only(self, operation: Operation) -> Outcome:
        (outcome,) = self.commit([operation])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    @contextmanager
    def _commit(self) -> Iterator[Connection]:
        with self._write() if self._database.is_sqlite else self._database.write_in_pipelines() as connection:
            yield connection

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        if not self._database.is_sqlite:
            with self._database.write() as connection:
                yield connection
            return
        # Waiting for SQLite's lock means polling. This lock wakes its next holder immediately.
        with self._turn, self._database.write() as connection:
            yield connection
