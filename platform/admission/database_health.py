"""Tracks whether the database accepts reservations, so that requests fail immediately instead of waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

STALLED_S = 3.0
"""The database counts as unresponsive if a transaction takes longer than this, in seconds."""

SILENT_S = 6.0
"""The database counts as unresponsive if the polling thread gets no answer for this many seconds."""

SILENCE = "the database does not answer"
"""The trouble of a database that is unresponsive, in one line for operators."""


class DatabaseTrouble(Exception):
    """The database cannot accept reservations now."""


class DatabaseHealth:
    """Tracks the database's health from reports by the code that uses it. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failure: str | None = None
        self._commits_began_s: dict[int, float] = {}
        self._heard_s: float | None = None
        self._well_since_s = -float("inf")

    def begin_commit(self) -> None:
        """Record the start of a transaction. A thread can have only one at a time."""
        self._commits_began_s[threading.get_ident()] = self._clock()

    def end_commit(self, failure: Exception | None) -> None:
        """Record the end of the thread's transaction. `failure` is the database's error, if any."""
        stalled = self._is_stalled()
        self._commits_began_s.pop(threading.get_ident(), None)
        if failure is not None:
            self.note_failure(failure)
        elif self._failure is not None or stalled:
            self.note_well()

    def note_failure(self, failure: Exception) -> None:
        cause = getattr(failure, "orig", None) or failure
        # SQLite's driver names each error, such as SQLITE_FULL. PostgreSQL's driver has an exception class for each.
        self._failure = getattr(cause, "sqlite_errorname", None) or type(cause).__name__

    def note_well(self) -> None:
        self._failure = None
        self._well_since_s = self._clock()

    def note_heard(self) -> None:
        if self._is_silent():
            self._well_since_s = self._clock()
        self._heard_s = self._clock()

    @property
    def has_failed(self) -> bool:
        """True if the last write failed. Only a successful write then shows that the database has recovered."""
        return self._failure is not None

    @property
    def trouble(self) -> str | None:
        """The database's problem in one line for operators, or None."""
        if self._failure is not None:
            return f"the database does not accept writes ({self._failure})"
        if self._is_stalled() or self._is_silent():
            return SILENCE
        return None

    @property
    def well_for_s(self) -> float:
        """Seconds since the last database trouble ended: 0 during trouble, infinity if there has been none."""
        return 0.0 if self.trouble is not None else self._clock() - self._well_since_s

    def check(self) -> None:
        trouble = self.trouble
        if trouble is not None:
            raise DatabaseTrouble(trouble)

    def _is_stalled(self) -> bool:
        began_s = list(self._commits_began_s.values())
        return bool(began_s) and self._clock() - min(began_s) > STALLED_S

    def _is_silent(self) -> bool:
        heard_s = self._heard_s
        return heard_s is not None and self._clock() - heard_s > SILENT_S
