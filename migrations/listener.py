"""Waits until a gateway's caches may be stale: for a notification on PostgreSQL, for a timeout on SQLite."""

from __future__ import annotations

import threading
import time
from typing import Any, Self

from sqlalchemy import Connection, select

from loramux.migrations.cache_triggers import CHANNEL
from loramux.migrations.database import Database
from loramux.migrations.schema import signals

_EPOCH = select(signals.c.value).where(signals.c.name == "caches")
_TURN_S = 0.25


class CacheListener:
    """Waits for changes. On PostgreSQL, it listens on a connection of its own.

    Its methods block. Use them from one thread, and set `stopped` to end a wait.

    Raises SQLAlchemyError, or the driver's own errors, if the database fails. To continue, open another listener.
    """

    def __init__(self, database: Database, stopped: threading.Event) -> None:
        self._database = database
        self._stopped = stopped
        self._connection: Connection | None = None
        if not database.is_sqlite:
            self._connection = database.detached_connection()
            self._connection.exec_driver_sql(f"LISTEN {CHANNEL}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._connection is not None:
            self._connection.close()

    def epoch(self) -> int:
        """Return a number that changes whenever a key, a tenant or a policy changes."""
        if self._connection is not None:
            return self._connection.execute(_EPOCH).scalar_one_or_none() or 0
        with self._database.read() as connection:
            return connection.execute(_EPOCH).scalar_one_or_none() or 0

    def wait(self, timeout_s: float) -> None:
        """Wait until `timeout_s` has passed, `stopped` is set or, on PostgreSQL only, a cached row changes."""
        if self._connection is None:
            self._stopped.wait(timeout_s)
            return
        driver: Any = self._connection.connection.dbapi_connection
        deadline = time.monotonic() + timeout_s
        while not self._stopped.is_set() and (left_s := deadline - time.monotonic()) > 0:
            # Wait in short intervals, so that shutdown is not delayed.
            if list(driver.notifies(timeout=min(left_s, _TURN_S), stop_after=1)):
                return
