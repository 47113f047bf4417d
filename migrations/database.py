"""Connect to SQLite or PostgreSQL, keep the schema current, and refuse to run on a wrong one."""

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
from sqlalchemy.exc import ArgumentError, InvalidatePoolError, OperationalError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool
from sqlalchemy.sql import func

from loramux.migrations import schema
from loramux.migrations.pipeline import TAKES_NO_WRITES, write_in_pipelines

Clock = Callable[[], int]
"""Microseconds since 1970."""

LONGEST_READ_S = 20.0
"""How long a reading that a caller's filters make long may keep the database busy."""

SQLITE_WAIT_S = 10.0
"""How long a writer waits for another."""

POOL_WAIT_S = 5.0
"""How long to wait for a connection when all are in use."""

_PATIENCE = {
    "connect_timeout": "5",
    # A server whose host has vanished says nothing: without these, its connections hang for a quarter of an hour.
    "tcp_user_timeout": "15000",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
}
"""What libpq is told where the URL does not say otherwise."""

UNASKED_S = 1.0
"""A connection that was used so lately is used again without asking whether it is still there."""

UPGRADE_ATTEMPTS = 5
"""How often an upgrade is tried that PostgreSQL has give way to others in a deadlock."""

_DEADLOCK = "40P01"
"""PostgreSQL's code for it."""

_CANCELLED = "57014"
"""PostgreSQL's code for a statement that it broke off."""

_STEPS_UNASKED = 1_000_000
"""Steps of SQLite's machine between two looks at the clock: tens of milliseconds."""

_WAL_ATTEMPTS, _WAL_PAUSE_S = 100, 0.05
_SAMPLED_ROWS = 1000
"""Of each index, for SQLite's statistics."""
_READ_ONLY = "loramux_read_only"


_NOW_US = cast(func.extract("epoch", func.clock_timestamp()) * 1_000_000, BigInteger)
_EPOCH = select(schema.signals.c.value).where(schema.signals.c.name == "caches")
_MOMENT = select(_NOW_US, _EPOCH.scalar_subquery())


@dataclass(frozen=True, slots=True)
class Moment:
    """A time, and the number of changes of keys, tenants and policies that had committed by then."""

    now_us: int
    epoch: int


class ReadTooLong(Exception):
    """A reading took longer than it may, and was broken off."""


class DatabaseError(Exception):
    """The database cannot be used; the message says how to mend it."""


class Database:
    """One SQL database. Synchronous: call it from a thread, never from the event loop.

    SQLite runs with WAL and `synchronous=FULL`; every transaction that writes begins with the write lock, so that a
    read inside it stays true until it commits.
    """

    def __init__(self, url: str, clock: Clock | None = None) -> None:
        self._clock = clock
        # Reentrant: SQLite itself refuses a writer within a writer.
        self._writing = threading.RLock()
        try:
            self._url = _parse_url(url)
            self._engine = _create_engine(self._url)
        except (ArgumentError, ValueError):
            # A password with a stray character is read as a port or a host: nothing of the URL is shown.
            raise DatabaseError(
                "the database URL is malformed: use sqlite:///FILE or postgresql://USER@HOST/NAME"
            ) from None

    @property
    def is_sqlite(self) -> bool:
        return self._engine.dialect.name == "sqlite"

    @property
    def num_connections(self) -> int:
        """Connections in use."""
        pool = self._engine.pool
        return pool.checkedout() if isinstance(pool, QueuePool) else 0

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that may write; committed on exit, rolled back on an exception."""
        with self._next_writer(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _next_writer(self) -> Iterator[None]:
        """Let the threads of this process write to SQLite one after the other.

        A thread that waits here goes on as soon as the lock is free. SQLite's own wait sleeps for up to a tenth of a
        second at a time, and is left for other processes.
        """
        is_held = self.is_sqlite and self._writing.acquire(timeout=SQLITE_WAIT_S)
        try:
            yield
        finally:
            if is_held:
                self._writing.release()

    @contextmanager
    def write_in_pipelines(self) -> Iterator[Connection]:
        """The same on PostgreSQL for who uses `pipeline`."""
        with write_in_pipelines(self._engine) as connection:
            yield connection

    @contextmanager
    def read(self, within_s: float | None = None) -> Iterator[Connection]:
        """A transaction that only reads; raises ReadTooLong for a statement that takes longer than `within_s`."""
        with self._engine.connect().execution_options(**{_READ_ONLY: True}) as connection, connection.begin():
            if within_s is None:
                yield connection
            else:
                with _bounded(connection, within_s):
                    yield connection

    def query(
        self, statement: Select[*tuple[Any, ...]], parameters: Mapping[str, object]
    ) -> Sequence[Row[*tuple[Any, ...]]]:
        """The rows of one statement that only reads.

        PostgreSQL needs no transaction around it, which saves two ways to the server and back.
        """
        if self.is_sqlite:
            with self.read() as connection:
                return connection.execute(statement, parameters).all()
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            return connection.execute(statement, parameters).all()

    def detached_connection(self) -> Connection:
        """A connection beside the pool, without transactions; the caller closes it. PostgreSQL only."""
        assert not self.is_sqlite
        connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        connection.detach()
        return connection

    def now_us(self, connection: Connection | None = None) -> int:
        """Microseconds since 1970: the injected clock, else PostgreSQL's own inside a transaction, else the host's."""
        if self._clock is not None:
            return self._clock()
        if connection is not None and not self.is_sqlite:
            return connection.execute(select(_NOW_US)).scalar_one()
        return time.time_ns() // 1000

    def moment(self, connection: Connection) -> Moment:
        """The time inside a transaction, as `now_us` has it, and the epoch of what gateways keep in memory."""
        if self._clock is None and not self.is_sqlite:
            now_us, epoch = connection.execute(_MOMENT).one()
            return Moment(now_us, epoch or 0)
        return Moment(self.now_us(connection), connection.execute(_EPOCH).scalar() or 0)

    @cached_property
    def moment_text(self) -> str:
        """The statement of `moment` as PostgreSQL's driver takes it; `moment_of` reads the row that it returns."""
        return str(_MOMENT.compile(dialect=self._engine.dialect, compile_kwargs={"literal_binds": True}))

    def moment_of(self, row: Sequence[Any]) -> Moment:
        return Moment(row[0] if self._clock is None else self._clock(), row[1] or 0)

    def upgrade(self, revision: str = "head") -> None:
        """Bring the schema to the newest version, or to one on the way there; safe to call on a current one.

        It is one transaction. Where that met gateways which were not stopped for it in a deadlock, nothing of it was
        done, and they have gone on: it is tried again.
        """
        with _mend(self._url):
            for _ in range(UPGRADE_ATTEMPTS - 1):
                try:
                    command.upgrade(self._alembic_config(), revision)
                except OperationalError as error:
                    if getattr(error.orig, "sqlstate", None) != _DEADLOCK:
                        raise
                else:
                    return
            command.upgrade(self._alembic_config(), revision)

    def refresh_statistics(self) -> None:
        """Let SQLite sample its indexes, by which it plans; PostgreSQL does so by itself. Takes milliseconds.

        Without them a report on one tenant reads the rows of all. https://sqlite.org/lang_analyze.html
        """
        if not self.is_sqlite:
            return
        with self._engine.begin() as connection:
            connection.exec_driver_sql(f"PRAGMA analysis_limit={_SAMPLED_ROWS}")
            connection.exec_driver_sql("ANALYZE")
        # A connection knows what was there when it was opened.
        self._engine.dispose()

    def check_schema(self) -> None:
        """Raise DatabaseError unless the database is reachable and its schema is the one this code was written for."""
        wanted = ScriptDirectory.from_config(self._alembic_config()).get_current_head()
        with _mend(self._url), self._engine.connect() as connection:
            found = MigrationContext.configure(connection).get_current_revision()
        if found != wanted:
            raise DatabaseError(
                f"the database schema is at {found or 'no version'}, this loramux needs {wanted}: "
                "run 'loramux db upgrade'"
            )

    def close(self) -> None:
        self._engine.dispose()

    def _alembic_config(self) -> Config:
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).parent))
        config.attributes["engine"] = self._engine
        return config


def _parse_url(url: str) -> URL:
    parsed = make_url(url)
    if parsed.drivername in ("postgresql", "postgres"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername not in ("sqlite", "postgresql+psycopg"):
        raise DatabaseError(f"databases of kind {parsed.drivername!r} are not supported: use SQLite or PostgreSQL")
    return parsed


def _create_engine(url: URL) -> Engine:
    # Errors, which are logged, quote statements but not what was in them.
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
        # Files have no limit: as many as there are threads, so that none waits for another's.
        max_overflow=-1,
        hide_parameters=True,
    )

    @event.listens_for(engine, "connect")
    def _configure(connection: Any, _record: Any) -> None:
        # The driver must not begin transactions by itself: `write` begins them with the write lock.
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
    """Break off what takes too long: each statement on PostgreSQL, all of them together on SQLite."""
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
            raise ReadTooLong(f"a reading took longer than {within_s:g} s") from error
        raise
    finally:
        if is_sqlite:
            driver.set_progress_handler(None, 0)


def _ping_the_rested(engine: Engine) -> None:
    """Ask a connection that has rested whether it is still there before it is used; one in constant use is."""

    @event.listens_for(engine, "checkin")
    def _note(_connection: Any, record: ConnectionPoolEntry) -> None:
        record.info["rests_since_s"] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def _ping(connection: Any, record: ConnectionPoolEntry, _proxy: Any) -> None:
        if time.monotonic() - record.info.get("rests_since_s", math.inf) > UNASKED_S:
            try:
                engine.dialect.do_ping(connection)
            except engine.dialect.loaded_dbapi.Error as error:
                # The pool takes or makes another, and drops those that are as old.
                raise InvalidatePoolError from error


def _leave_what_takes_no_writes(context: ExceptionContext) -> OperationalError | None:
    """A server that became a standby, or whose host made it read-only because its disk is full, is in trouble.

    The driver calls that an internal error, and the connections would stay with a standby for as long as they live.
    """
    cause = context.original_exception
    if getattr(cause, "sqlstate", None) != TAKES_NO_WRITES:
        return None
    context.is_disconnect = True
    return OperationalError(context.statement, None, cause, hide_parameters=True, connection_invalidated=True)


def _use_wal(cursor: Any) -> None:
    """Switch the file to WAL, which stays so; servers that start together on a new file may all try at once."""
    for _ in range(_WAL_ATTEMPTS):
        try:
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            # The driver's own wait for locks does not cover this change.
            if "locked" not in str(error):
                raise
            time.sleep(_WAL_PAUSE_S)
        else:
            return
    cursor.execute("PRAGMA journal_mode=WAL")


@contextmanager
def _mend(url: URL) -> Iterator[None]:
    try:
        yield
    except CommandError as error:
        raise DatabaseError(
            f"the database schema was made by another version of loramux: {error}; install that version or a newer one"
        ) from error
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).splitlines()[0]
        shown = url.render_as_string(hide_password=True)
        raise DatabaseError(f"the database {shown} cannot be used: {reason}") from error
