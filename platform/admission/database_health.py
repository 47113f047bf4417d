"""Whether the database takes reservations now, so that a request is refused at once rather than after a wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

STALLED_S = 3.0
"""A transaction that takes longer is one of a database that has stopped answering."""

SILENT_S = 6.0
"""The same where nothing is written: the thread that polls each second has read nothing for so long."""

TROUBLE = (OperationalError, InterfaceError, PoolTimeout)
"""What the driver raises when the database is away, full, locked or out of connections."""


class DatabaseTrouble(Exception):
    """The database cannot take reservations now."""


class DatabaseHealth:
    """Told by whoever uses the database; asked before a request is admitted. Threads may call it as they like."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failure: str | None = None
        self._commits_began_s: dict[int, float] = {}
        self._heard_s: float | None = None
        self._well_since_s = -float("inf")

    def begin_commit(self) -> None:
        """A transaction begins; there is one at a time in each thread."""
        self._commits_began_s[threading.get_ident()] = self._clock()

    def end_commit(self, failure: Exception | None) -> None:
        """It ended, or failed because of the database."""
        stalled = self._is_stalled()
        self._commits_began_s.pop(threading.get_ident(), None)
        if failure is not None:
            self.note_failure(failure)
        elif self._failure is not None or stalled:
            self.note_well()

    def note_failure(self, failure: Exception) -> None:
        cause = getattr(failure, "orig", None) or failure
        # SQLite's name of the error, such as SQLITE_FULL; PostgreSQL's driver has a class for each.
        self._failure = getattr(cause, "sqlite_errorname", None) or type(cause).__name__

    def note_well(self) -> None:
        """It took a write."""
        self._failure = None
        self._well_since_s = self._clock()

    def note_heard(self) -> None:
        """It answered a read."""
        if self._is_silent():
            self._well_since_s = self._clock()
        self._heard_s = self._clock()

    @property
    def has_failed(self) -> bool:
        """Whether the last write failed, so that only another can tell that it is well again."""
        return self._failure is not None

    @property
    def trouble(self) -> str | None:
        """What is wrong with it, in a line for operators."""
        if self._failure is not None:
            return f"the database does not take writes ({self._failure})"
        if self._is_stalled() or self._is_silent():
            return "the database does not answer"
        return None

    @property
    def well_for_s(self) -> float:
        """How long ago its last trouble ended; infinite where there was none."""
        return 0.0 if self.trouble is not None else self._clock() - self._well_since_s

    def check(self) -> None:
        """Raise DatabaseTrouble where a reservation could not be taken now."""
        trouble = self.trouble
        if trouble is not None:
            raise DatabaseTrouble(trouble)

    def _is_stalled(self) -> bool:
        began_s = list(self._commits_began_s.values())
        return bool(began_s) and self._clock() - min(began_s) > STALLED_S

    def _is_silent(self) -> bool:
        heard_s = self._heard_s
        return heard_s is not None and self._clock() - heard_s > SILENT_S
