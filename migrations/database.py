"""Connects to SQLite or PostgreSQL, upgrades the schema, and refuses to run on the wrong schema."""

from __future__ import annotations

import math
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import BigInteger, Connection, Engine, Row, Select, cast, create_engine, event, select
from sqlalchemy.engine import URL, ExceptionContext, make_url
from sqlalchemy.exc import ArgumentError, InterfaceError, InvalidatePoolError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool
from sqlalchemy.sql import func

from loramux.migrations import schema
from loramux.migrations.pipeline import TAKES_NO_WRITES, write_in_pipelines

Clock = Callable[[], int]
"""Returns the time in microseconds since 1970."""

DATABASE_TROUBLE = (OperationalError, InterfaceError, PoolTimeout)
"""Exceptions raised when the database is unreachable, full, locked or out of connections."""

LONGEST_READ_S = 20.0
"""Time limit, in seconds, for reads whose cost depends on a caller's filters."""

SQLITE_WAIT_S = 10.0
"""Longest time that a SQLite writer waits for writers in its own process, and then in other processes, in seconds."""

POOL_WAIT_S = 5.0
"""Longest wait for a connection when all are in use, in seconds."""

_PATIENCE = {
    "connect_timeout": "5",
    # Without these settings, connections to a vanished host hang for a quarter of an hour.
    "tcp_user_timeout": "15000",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
}
"""loramux's defaults for libpq's parameters. The URL can override them."""

UNASKED_S = 1.0
"""Longest idle time, in seconds, after which a connection is reused without a ping."""

CLOCK_FRESH_S = 1.0
"""How long PostgreSQL's last answer counts as fresh, in seconds. If each transaction asked for the time, that would be
a sixth of the statements of a push.
"""

UPGRADE_ATTEMPTS = 5
"""Maximum number of attempts at an upgrade that PostgreSQL aborts because of deadlocks."""

LAST_WITH_OLDER_STEPS = "db435589"
"""Commit that upgrades databases whose version is older than the first step in `versions/`."""

_DEADLOCK = "40P01"
"""PostgreSQL's error code for a deadlock."""

_CANCELLED = "57014"
"""PostgreSQL's error code for a cancelled statement."""

_STEPS_UNASKED = 1_000_000
"""SQLite virtual machine steps between checks of the clock. This many steps take tens of milliseconds."""

_WAL_ATTEMPTS, _WAL_PAUSE_S = 100, 0.05
_SAMPLED_ROWS = 1000
"""Number of rows sampled per index for SQLite's statistics."""
_READ_ONLY = "loramux_read_only"


_NOW_US = cast(func.extract("epoch", func.clock_timestamp()) * 1_000_000, BigInteger)
_EPOCH = select(schema.signals.c.value).where(schema.signals.c.name == "caches")
_MOMENT = select(_NOW_US, _EPOCH.scalar_subquery())


@dataclass(frozen=True, slots=True)
class Moment:
    """A time, and the number of changes to keys, tenants and policies that were committed by that time."""

    now_us: int
    epoch: int


def _since_boot_us() -> int:
    """Time since the host started, including the time for which it was suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000


class ReadTooLong(Exception):
    """A read exceeded its time limit and was cancelled."""


class DatabaseError(Exception):
    """The database cannot be used. The message says why."""


class NoDatabase(DatabaseError):
    """The file of a SQLite database does not exist."""


class WrongSchema(DatabaseError):
    """The database does not have the schema that this code needs. `fix` says what to do."""

    def __init__(self, finding: str, fix: str) -> None:
        super().__init__(f"{finding}: {fix}")
        self.fix = fix


class Database:
    """One SQL database, on SQLite or PostgreSQL. Synchronous: call it from a thread, never from the event loop.

    SQLite runs with WAL and `synchronous=FULL`. Its writing transactions take the write lock when they begin, so the
    rows that they read cannot change before they commit.
    """

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self._clock = clock
        self._ahead_us: int | None = None
        self._heard_us: float = -math.inf
        """When PostgreSQL last told its time, since the host started."""
        # The lock is reentrant, so that a nested writer waits only once: for SQLite's lock, until SQLite rejects it.
        self._writing = threading.RLock()
        with _malformed_as_database_error():
            self._url = _parse_url(url)
            self._engine = _create_engine(self._url)

    @property
    def is_sqlite(self) -> bool:
        return self._engine.dialect.name == "sqlite"

    @property
    def num_connections(self) -> int:
        pool = self._engine.pool
        return pool.checkedout() if isinstance(pool, QueuePool) else 0

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that can write. It commits on exit and rolls back on an exception."""
        with self._next_writer(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _next_writer(self) -> Iterator[None]:
        """Let this process's threads write to SQLite one at a time.

        A thread that waits here continues as soon as the lock is free. SQLite's own wait sleeps for up to a tenth of a
        second at a time, and is needed only between processes.
        """
        is_held = self.is_sqlite and self._writing.acquire(timeout=SQLITE_WAIT_S)
        try:
            yield
        finally:
            if is_held:
                self._writing.release()

    @contextmanager
    def write_in_pipelines(self) -> Iterator[Connection]:
        """A PostgreSQL transaction that can write, for callers that use `pipeline`."""
        with write_in_pipelines(self._engine) as connection:
            yield connection

    @contextmanager
    def read(self, within_s: float | None = None) -> Iterator[Connection]:
        """A read-only transaction.

        Raises ReadTooLong after `within_s` seconds, counted per statement on PostgreSQL and in total on SQLite.
        """
        with self._engine.connect().execution_options(**{_READ_ONLY: True}) as connection, connection.begin():
            if within_s is None:
                yield connection
            else:
                with _bounded(connection, within_s):
                    yield connection

    def query(
        self, statement: Select[*tuple[Any, ...]], parameters: Mapping[str, object]
    ) -> Sequence[Row[*tuple[Any, ...]]]:
        """Return the rows of one read-only statement.

        On PostgreSQL, the statement runs without a transaction, which saves two round trips.
        """
        if self.is_sqlite:
            with self.read() as connection:
                return connection.execute(statement, parameters).all()
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            return connection.execute(statement, parameters).all()

    def detached_connection(self) -> Connection:
        """Open a connection outside the pool, in autocommit mode. The caller closes it. PostgreSQL only."""
        assert not self.is_sqlite
        connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        connection.detach()
        return connection

    def now_us(self, connection: Connection | None = None) -> int:
        """Return microseconds since 1970.

        The source is the injected clock if there is one, otherwise the host's clock on SQLite and the server's clock on
        PostgreSQL, because the clocks of hosts that share a database may differ. PostgreSQL's time is computed from its
        last answer and the host's monotonic clock, and with `connection`, that answer is at most `CLOCK_FRESH_S` old.
        """
        if self._clock is not None:
            return self._clock()
        if self.is_sqlite:
            return time.time_ns() // 1000
        since_boot_us = _since_boot_us()
        if connection is not None and since_boot_us >= self._heard_us + CLOCK_FRESH_S * 1e6:
            return self._heard(connection.execute(select(_NOW_US)).scalar_one())
        if self._ahead_us is None:
            with self.read() as reading:
                return self.now_us(reading)
        return since_boot_us + self._ahead_us

    def moment(self, connection: Connection) -> Moment:
        """Return the time, from the same source as `now_us`, and the epoch of the gateways' caches."""
        if self._clock is None and not self.is_sqlite:
            now_us, epoch = connection.execute(_MOMENT).one()
            return Moment(self._heard(now_us), epoch or 0)
        return Moment(self.now_us(connection), connection.execute(_EPOCH).scalar() or 0)

    @cached_property
    def moment_text(self) -> str:
        """The statement that `moment` runs, for PostgreSQL's driver. `moment_of` reads its row."""
        return str(_MOMENT.compile(dialect=self._engine.dialect, compile_kwargs={"literal_binds": True}))

    def moment_of(self, row: Sequence[Any]) -> Moment:
        return Moment(self._heard(row[0]) if self._clock is None else self._clock(), row[1] or 0)

    def _heard(self, now_us: int) -> int:
        since_boot_us = _since_boot_us()
        self._heard_us, self._ahead_us = since_boot_us, now_us - since_boot_us
        return now_us

    def upgrade(self) -> None:
        """Upgrade the schema to the newest version. Does nothing if the schema is current and has its triggers.

        The upgrade is one transaction. If it deadlocks with gateways that are still running, it is rolled back and
        retried, and the gateways continue. Raises WrongSchema if no step upgrades the database's version.
        """
        self._known_revision()
        with _as_database_error(self._url):
            for _ in range(UPGRADE_ATTEMPTS - 1):
                try:
                    command.upgrade(self._alembic_config(), "head")
                except OperationalError as error:
                    if getattr(error.orig, "sqlstate", None) != _DEADLOCK:
                        raise
                else:
                    return
            command.upgrade(self._alembic_config(), "head")

    def refresh_statistics(self) -> None:
        """Make SQLite collect statistics for its query planner by sampling its indexes. Takes milliseconds.

        PostgreSQL collects its statistics by itself. Without statistics, a report on one tenant reads every
        tenant's rows. See https://sqlite.org/lang_analyze.html
        """
        if not self.is_sqlite:
            return
        with self._engine.begin() as connection:
            connection.exec_driver_sql(f"PRAGMA analysis_limit={_SAMPLED_ROWS}")
            connection.exec_driver_sql("ANALYZE")
        # Close all connections, because open ones keep the old statistics.
        self._engine.dispose()

    def check_schema(self) -> None:
        """Raise DatabaseError unless the database is reachable and has the schema that this code needs.

        Creates nothing: for a SQLite file that does not exist, the error is NoDatabase.
        """
        file = self._url.database
        # SQLite would create the file.
        if self.is_sqlite and file and not file.startswith((":", "file:")) and not Path(file).exists():
            raise NoDatabase(f"there is no database {file}")
        found, wanted = self._known_revision(), self._steps().get_current_head()
        if found != wanted:
            raise WrongSchema(
                f"the database schema is at {found or 'no version'}, but this version of loramux needs {wanted}",
                "run 'loramux db upgrade'",
            )

    def _known_revision(self) -> str | None:
        """Return the schema's version, or None for an empty database. Raise WrongSchema if no step has this version."""
        steps = self._steps()
        with _as_database_error(self._url), self.read() as connection:
            found = MigrationContext.configure(connection).get_current_revision()
        if found is None or any(step.revision == found for step in steps.walk_revisions()):
            return found
        first = str(steps.get_base())
        if found.isdecimal() and int(found) < int(first):
            raise WrongSchema(
                f"the database schema is at {found}, which this version of loramux cannot upgrade",
                f"use commit {LAST_WITH_OLDER_STEPS} to upgrade it to {first}, as docs/operations.md describes",
            )
        raise WrongSchema(
            f"the database schema is at {found}, which belongs to another version of loramux",
            "install that version or a newer one",
        )

    def _steps(self) -> ScriptDirectory:
        return ScriptDirectory.from_config(self._alembic_config())

    def close(self) -> None:
        self._engine.dispose()

    def _alembic_config(self) -> Config:
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent))
        config.attributes["engine"] = self._engine
        return config


def check_url(url: str) -> None:
    """Raise DatabaseError unless this is the URL of a database of a supported kind. Connects to nothing."""
    with _malformed_as_database_error():
        _parse_url(url)


@contextmanager
def _malformed_as_database_error() -> Iterator[None]:
    try:
        yield
    except (ArgumentError, ValueError):
        # A stray character can make part of a password parse as a port or host, so show no part of the URL.
        raise DatabaseError(
            "the database URL is malformed: use sqlite:///FILE or postgresql://USER@HOST/NAME"
        ) from None


def _parse_url(url: str) -> URL:
    parsed = make_url(url)
    if "@" in (parsed.host or ""):
        # A part of the password would count as the host, and be shown in errors.
        raise DatabaseError("the database URL has two @: write an @ of the user name or the password as %40")
    if parsed.drivername in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "postgresql+psycopg"):
        raise DatabaseError(f"databases of kind {parsed.drivername!r} are not supported: use SQLite or PostgreSQL")
    return parsed


def _create_engine(url: URL) -> Engine:
    # Logged errors quote statements but not their parameters.
    if url.get_backend_name() != "sqlite":
        engine = create_engine(
            url.update_query_dict(_PATIENCE | dict(url.query)),
            pool_size=8,
            max_overflow=24,
            pool_timeout=POOL_WAIT_S,
            hide_parameters=True,
        )
        _ping_the_rested(engine)
        event.listen(engine, "handle_error", _leave_what_takes_no_writes)
        return engine
    engine = create_engine(
        url,
        connect_args={"timeout": SQLITE_WAIT_S, "check_same_thread": False},
        poolclass=QueuePool,
        # The number of SQLite connections is unlimited, so that no thread waits for another thread's connection.
        max_overflow=-1,
        hide_parameters=True,
    )

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        # Keep the driver from beginning transactions: `_begin` does so, and takes the write lock for writers.
        connection.isolation_level = None
        cursor = connection.cursor()
        _use_wal(cursor)
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        read_only = connection.get_execution_options().get(_READ_ONLY, False)
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


@contextmanager
def _bounded(connection: Connection, within_s: float) -> Iterator[None]:
    """Cancel reads that take too long. PostgreSQL limits each statement, and SQLite limits all statements together."""
    is_sqlite = connection.dialect.name == "sqlite"
    driver: Any = connection.connection.driver_connection
    if is_sqlite:
        ends_s = time.monotonic() + within_s
        driver.set_progress_handler(lambda: time.monotonic() > ends_s, _STEPS_UNASKED)
    else:
        connection.exec_driver_sql(f"SET LOCAL statement_timeout = {math.ceil(within_s * 1000)}")
    try:
        yield
    except OperationalError as error:
        if getattr(error.orig, "sqlstate", None) == _CANCELLED or str(error.orig) == "interrupted":
            raise ReadTooLong(f"a read took longer than {within_s:g} s") from error
        raise
    finally:
        if is_sqlite:
            driver.set_progress_handler(None, 0)


def _ping_the_rested(engine: Engine) -> None:
    """Ping a connection before it is reused if it was idle for more than UNASKED_S."""

    @event.listens_for(engine, "checkin")
    def _note(_connection: Any, record: ConnectionPoolEntry) -> None:
        record.info["rests_since_s"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def _ping(connection: Any, record: ConnectionPoolEntry, _proxy: Any) -> None:
        if time.monotonic() - record.info.get("rests_since_s", math.inf) > UNASKED_S:
            try:
                engine.dialect.do_ping(connection)
            except engine.dialect.loaded_dbapi.Error as error:
                # Makes the pool reconnect, and replace all its other connections before they are used again.
                raise InvalidatePoolError from error


def _leave_what_takes_no_writes(context: ExceptionContext) -> OperationalError | None:
    """Disconnect from a server that became a standby, or was made read-only because its disk is full.

    The driver reports only an internal error. Without this check, connections to a standby would stay open forever.
    """
    cause = context.original_exception
    if getattr(cause, "sqlstate", None) != TAKES_NO_WRITES:
        return None
    context.is_disconnect = True
    return OperationalError(context.statement, None, cause, hide_parameters=True, connection_invalidated=True)


def _use_wal(cursor: Any) -> None:
    """Switch the database file to WAL mode permanently. All servers that start together on a new file try this."""
    for _ in range(_WAL_ATTEMPTS):
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            # The driver's own lock timeout does not cover this change.
            if "locked" not in str(error):
                raise
            time.sleep(_WAL_PAUSE_S)
        else:
            return
    cursor.execute("PRAGMA journal_mode=WAL")


@contextmanager
def _as_database_error(url: URL) -> Iterator[None]:
    try:
        yield
    except CommandError as error:
        raise DatabaseError(
            f"the database schema was made by another version of loramux: {error}; install that version or a newer one"
        ) from error
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).splitlines()[0]
        # Show the URL as the settings have it, without the driver.
        shown = url.set(drivername=url.get_backend_name()).render_as_string(hide_password=True)
        raise DatabaseError(f"the database {shown} cannot be used: {reason}") from error
