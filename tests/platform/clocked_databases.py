"""Databases on a clock that only the test advances."""

from __future__ import annotations

import copy

from sqlalchemy import delete, text

from loramux.migrations.database import Database
from loramux.migrations.schema import metadata

START_US = 1_800_000_000_000_000


class FakeClock:
    """A clock in microseconds that only the test advances."""

    def __init__(self) -> None:
        self.now_us = START_US

    def __call__(self) -> int:
        return self.now_us

    def advance(self, seconds: float) -> None:
        self.now_us += round(seconds * 1_000_000)


def with_shared_connections(database: Database, clock: FakeClock | None = None) -> Database:
    """A database on another clock, with the connections of `database` and with event listeners of its own.

    A new connection reads the whole schema, which takes longer than most tests.
    """
    shared = copy.copy(database)
    shared._clock = clock
    shared._engine = database._engine.execution_options()
    return shared


_USED = text(" UNION ALL ".join(f"SELECT '{name}' WHERE EXISTS (SELECT 1 FROM \"{name}\")" for name in metadata.tables))
"""Selects the names of the tables that have rows."""


def empty(database: Database) -> None:
    with database.write() as connection:
        used = set(connection.execute(_USED).scalars())
        for table in reversed(metadata.sorted_tables):
            if table.name in used:
                connection.execute(delete(table))
