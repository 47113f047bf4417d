"""Sends statements to PostgreSQL together, so that a transaction takes a few round trips, not one per statement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError, OperationalError

TAKES_NO_WRITES = "25006"
"""PostgreSQL's error code for a write in read-only mode."""


class Run(Protocol):
    """Sends a statement's text to the driver. The rows can be fetched after the round trip."""

    def __call__(self, statement: str, parameters: Mapping[str, Any] | None = None, /) -> psycopg.Cursor[Any]: ...


@contextmanager
def write_in_pipelines(engine: Engine) -> Iterator[Connection]:
    """A transaction that begins with its first `pipeline` call and may commit with its last.

    Otherwise it commits on exit. On an exception, it rolls back. Reads before the first `pipeline` call happen outside
    the transaction.
    """
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        driver = _driver(connection)
        try:
            yield connection
            with _as_sqlalchemy(connection):
                driver.commit()
        except BaseException:
            if not driver.closed:
                with _as_sqlalchemy(connection):
                    driver.rollback()
            raise


@contextmanager
def pipeline(connection: Connection, is_last: bool = False) -> Iterator[Run]:
    """Run statements in one round trip. If a statement fails, later statements do not run. PostgreSQL only.

    With `is_last`, also commits the transaction. Raises SQLAlchemy's errors.
    """
    driver = _driver(connection)
    with _as_sqlalchemy(connection), driver.pipeline():
        if driver.autocommit and driver.info.transaction_status == TransactionStatus.IDLE:
            driver.execute("BEGIN")
        yield driver.execute
        if is_last:
            driver.execute("COMMIT")


def _driver(connection: Connection) -> psycopg.Connection[Any]:
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    return driver


@contextmanager
def _as_sqlalchemy(connection: Connection) -> Iterator[None]:
    driver = _driver(connection)
    try:
        yield
    except psycopg.Error as error:
        takes_no_writes = error.sqlstate == TAKES_NO_WRITES
        is_lost = driver.closed or takes_no_writes
        if is_lost:
            # The pool's other connections are just as old, so drop them too.
            connection.invalidate(error)
            connection.engine.dispose()
        if takes_no_writes:
            raise OperationalError(None, None, error, hide_parameters=True, connection_invalidated=True) from error
        raise DBAPIError.instance(
            None,
            None,
            error,
            psycopg.Error,
            hide_parameters=True,
            connection_invalidated=is_lost,
            dialect=connection.dialect,
        ) from error
