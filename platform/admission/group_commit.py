"""Commits reservations and settlements on threads. Operations that arrive during a commit share the next one."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy.exc import SQLAlchemyError

from loramux.migrations.database import DATABASE_TROUBLE
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.database_health import DatabaseHealth
from loramux.platform.admission.records import Operation, Outcome

MAX_OPERATIONS = 256
"""Maximum number of operations in one transaction. A transaction locks the counters that all its operations need."""

NoteCommit = Callable[[int, float, bool], None]
"""Called after each transaction with its number of operations, its duration in seconds, and whether it failed."""

WORTH_ANOTHER = 32
"""While one transaction is in progress, this many waiting operations start a second one."""

MAX_ATTEMPTS = 4
RETRY_S = 0.02
TRANSIENT_SQLSTATES = ("40001", "40P01")
"""PostgreSQL's codes for errors that a retry resolves: serialisation failure and deadlock."""

_log = structlog.get_logger(__name__)


class CommitterClosed(RuntimeError):
    """The gateway has stopped, so the operation was not executed."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    operation: Operation
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[Any]


class GroupCommit:
    """Commits operations on its own threads, batching up to MAX_OPERATIONS waiting operations into one transaction.

    An operation that finds the threads idle is committed immediately. Other operations wait for the commit in progress.
    A busy gateway therefore waits for the disk once per batch, and an idle one never waits for a batch to fill. If
    enough operations are waiting, a second thread checks them while the database executes the first batch. A refusal,
    or any error other than a failing database, affects only its own operation.
    """

    def __init__(
        self,
        admission: Admission,
        note_commit: NoteCommit | None = None,
        health: DatabaseHealth | None = None,
        num_threads: int = 1,
    ) -> None:
        self._admission = admission
        self._note_commit = note_commit
        self._health = health if health is not None else DatabaseHealth()
        self._waiting: deque[_Waiting] = deque()
        self._has_changed = threading.Condition()
        self._is_closed = False
        self._num_under_way = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"group-commit-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, operation: Operation) -> asyncio.Future[Any]:
        """Queue an operation and return a future for its outcome. Cancelling the future does not cancel the operation.

        After `close`, the operation is not executed and the future raises CommitterClosed.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        with self._has_changed:
            if self._is_closed:
                answer.set_exception(CommitterClosed("the gateway has stopped"))
                return answer
            self._waiting.append(_Waiting(operation, loop, answer))
            # Waking a thread for too few operations would only cause contention for the interpreter lock.
            if self._is_worth_it():
                self._has_changed.notify()
        return answer

    def close(self, timeout_s: float | None = None) -> None:
        """Commit the waiting operations and stop. Block for at most `timeout_s`.

        If the database does not answer within that time, the operations that are still waiting fail, and the threads
        end with the process.
        """
        with self._has_changed:
            self._is_closed = True
            self._has_changed.notify_all()
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if ends_s is None else max(0.0, ends_s - time.monotonic()))
        with self._has_changed:
            left = list(self._waiting)
            self._waiting.clear()
        _answer(left, [CommitterClosed("the gateway has stopped")] * len(left))

    def _run(self) -> None:
        while batch := self._next():
            started_s = time.monotonic()
            self._health.begin_commit()
            outcomes = self._commit([waiting.operation for waiting in batch])
            with self._has_changed:
                self._num_under_way -= len(batch)
                if self._is_worth_it():
                    # Let another thread commit while this one delivers its outcomes.
                    self._has_changed.notify()
            self._health.end_commit(next((one for one in outcomes if isinstance(one, DATABASE_TROUBLE)), None))
            if self._note_commit is not None:
                has_failed = any(isinstance(outcome, SQLAlchemyError) for outcome in outcomes)
                self._note_commit(len(batch), time.monotonic() - started_s, has_failed)
            _answer(batch, outcomes)

    def _next(self) -> list[_Waiting]:
        with self._has_changed:
            self._has_changed.wait_for(lambda: self._is_closed or self._is_worth_it())
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_OPERATIONS))]
            self._num_under_way += len(batch)
            if self._is_worth_it():
                self._has_changed.notify()
            return batch

    def _is_worth_it(self) -> bool:
        """Return whether to commit the waiting operations now, rather than after the current commit."""
        return len(self._waiting) >= (WORTH_ANOTHER if self._num_under_way else 1)

    def _commit(self, operations: list[Operation], attempt: int = 1) -> list[Outcome]:
        try:
            return self._admission.commit(operations)
        except DATABASE_TROUBLE as error:
            if _is_transient(error) and attempt < MAX_ATTEMPTS:
                # A conflicting transaction won, and the database rolled this one back.
                time.sleep(random.uniform(0, RETRY_S * attempt))
                return self._commit(operations, attempt + 1)
            # The database is in trouble. Retrying each operation would only repeat the error.
            return [error] * len(operations)
        except Exception as error:
            if len(operations) == 1:
                if not isinstance(error, SQLAlchemyError):
                    _log.exception("an operation failed")
                return [error]
            cause = repr(getattr(error, "orig", error))
            _log.warning("a batch failed; retrying each operation in its own transaction", error=cause)
            return [outcome for operation in operations for outcome in self._commit([operation])]


def _is_transient(error: SQLAlchemyError) -> bool:
    return getattr(getattr(error, "orig", None), "sqlstate", None) in TRANSIENT_SQLSTATES


def _answer(batch: list[_Waiting], outcomes: list[Outcome]) -> None:
    """Deliver the outcomes, with one call per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Outcome]]] = {}
    for waiting, outcome in zip(batch, outcomes, strict=True):
        by_loop.setdefault(waiting.loop, []).append((waiting.answer, outcome))
    for loop, answers in by_loop.items():
        try:
            loop.call_soon_threadsafe(_resolve, answers)
        except RuntimeError:
            continue


def _resolve(answers: list[tuple[asyncio.Future[Any], Outcome]]) -> None:
    for answer, outcome in answers:
        if answer.done():
            continue
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)
