"""Empties a gateway's caches when a key, a tenant or a policy has changed anywhere."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import structlog

from loramux.migrations.database import Database
from loramux.migrations.listener import CacheListener

POLL_INTERVAL_S = 1.0
"""How often the epoch is read where no notice comes: always on SQLite, and where a proxy swallows PostgreSQL's."""

RETRY_S = 1.0
END_WAIT_S = 2.0

log = structlog.get_logger()


class CacheInvalidation:
    """A thread that calls every one of `forget` after a change, by itself or within POLL_INTERVAL_S.

    While the database cannot be watched the caches are left to expire, which every entry does within five seconds.
    `note_heard` is called whenever the database answered.
    A cache that is filled from a read that began before the change may keep the old for that long too.
    """

    def __init__(
        self, database: Database, forget: Sequence[Callable[[], None]], note_heard: Callable[[], None] | None = None
    ) -> None:
        self._database = database
        self._forget = forget
        self._note_heard = note_heard
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cache-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; one that waits for a database that does not answer is left to end with the process."""
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
                # Whatever it was: the entries expire by themselves, and the next round listens again.
                if is_well and not self._stopped.is_set():
                    log.warning("changes of keys and policies cannot be followed; trying again", error=str(error))
                is_well = False
                self._stopped.wait(RETRY_S)

    def _follow(self, listener: CacheListener) -> None:
        epoch = listener.epoch()
        # What changed before we listened is unknown.
        self._tell()
        while not self._stopped.is_set():
            listener.wait(POLL_INTERVAL_S)
            now = listener.epoch()
            if self._note_heard is not None:
                self._note_heard()
            if now != epoch:
                epoch = now
                self._tell()

    def _tell(self) -> None:
        for forget in self._forget:
            forget()
