"""Databases on a clock that only the test advances."""

from __future__ import annotations

from sqlalchemy import delete

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


def empty(database: Database) -> None:
    with database.write() as connection:
        for table in reversed(metadata.sorted_tables):
            connection.execute(delete(table))
