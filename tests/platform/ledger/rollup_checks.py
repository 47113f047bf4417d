from __future__ import annotations

from typing import Any

from sqlalchemy import func, select

from loramux.migrations import schema
from loramux.migrations.database import Database
from tests.platform.ledger.rebuilt_rollups import rebuild_all_rollups


def num_waiting(database: Database) -> int:
    """Number of settlement transactions that are not yet folded into the rollups."""
    with database.read() as connection:
        return connection.execute(select(func.count()).select_from(schema.usage_batches)).scalar_one()


def all_rollups(database: Database) -> set[tuple[Any, ...]]:
    """Return every row, with its series' content in place of the series' number."""
    rollups, series = schema.usage_rollups.c, schema.usage_series.c
    rest = [column for column in rollups if column.name != "series_id"]
    query = select(*rest, *(column for column in series if column.name != "id")).where(rollups.series_id == series.id)
    with database.read() as connection:
        rows = [tuple(row) for row in connection.execute(query)]
    assert len(set(rows)) == len(rows)
    return set(rows)


def rebuild_rollups(database: Database) -> set[tuple[Any, ...]]:
    """Rebuild all rows from the ledger, inside the database, and return them."""
    with database.write() as connection:
        for statement in rebuild_all_rollups():
            connection.exec_driver_sql(statement.replace("%", "%%") if not database.is_sqlite else statement)
    return all_rollups(database)
