"""Clears a gateway's caches after any process changes a key, a tenant or a policy, and confirms them until then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import structlog

from loramux.migrations.database import Database
from loramux.migrations.listener import CacheListener

POLL_INTERVAL_S = 1.0
"""Interval between polls for changes, in seconds.

Polling is needed because SQLite sends no notifications, and a proxy can drop PostgreSQL's notifications.
"""

RETRY_S = 1.0
END_WAIT_S = 2.0

log = structlog.get_logger()


class CacheInvalidation:
    """A thread that calls every function in `forget` after a change.

    The thread is notified of a change or notices it within POLL_INTERVAL_S. If the database cannot be watched, cache
    entries expire within five seconds. A change that the database does not announce takes effect within MAX_AGE_US: see
    `change_watch`. `note_heard` is called after each successful poll. So is every function in `confirm`, with a time in
    microseconds: all changes before it have been told.
    """

    def __init__(
        self,
        database: Database,
        forget: Sequence[Callable[[], None]],
        note_heard: Callable[[], None] | None = None,
        confirm: Sequence[Callable[[int], None]] = (),
    ) -> None:
        self._database = database
        self._forget = forget
        self._note_heard = note_heard
        self._confirm = confirm
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cache-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. A thread that waits for an unresponsive database ends with the process instead."""
        self._stopped.set()
        self._thread.join(END_WAIT_S)

    def _run(self) -> None:
        is_well = True
        while not self._stopped.is_set():
            try:
                with CacheListener(self._database, self._stopped) as listener:
                    is_well = True
                    self._follow(listener)
            except Exception as error:
                # After a failure, cache entries still expire, and the next iteration listens again.
                if is_well and not self._stopped.is_set():
                    log.warning("cannot watch for changes to keys and policies; trying again", error=str(error))
                is_well = False
                self._stopped.wait(RETRY_S)

    def _follow(self, listener: CacheListener) -> None:
        epoch = listener.epoch()
        # Clear the caches, because changes made before the thread started to listen went unnoticed.
        self._tell()
        while not self._stopped.is_set():
            listener.wait(POLL_INTERVAL_S)
            asked_us = self._database.now_us()
            now = listener.epoch()
            if self._note_heard is not None:
                self._note_heard()
            if now != epoch:
                epoch = now
                self._tell()
            for confirm in self._confirm:
                confirm(asked_us)

    def _tell(self) -> None:
        for forget in self._forget:
            forget()
