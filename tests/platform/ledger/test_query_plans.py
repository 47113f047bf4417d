from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Select, event
from sqlalchemy.dialects import postgresql

from loramux.migrations.database import Database
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.ledger.events import Ledger
from loramux.platform.ledger.grains import DAY_US
from loramux.platform.ledger.query import UsageQuery
from loramux.platform.ledger.report import answer, largest
from loramux.platform.ledger.report_sql import select_all
from tests.migrated import migrated_sqlite

SAMPLES = {
    # Statistics as for ten million requests, from a thousand rows of each index. The rows for all tenants together come
    # first.
    ("usage_rollups", "ix_usage_rollups_tenant_span_start"): "45456075 1001 1001 1001 3",
    ("usage_rollups", "usage_rollups"): "35633520 1001 1001 6 2 1",
    ("usage_events", "ix_usage_events_tenant_request"): "5191150 1001 1",
    ("usage_events", "ix_usage_events_tenant_finished"): "9809800 1001 1",
    ("usage_events", "ix_usage_events_finished"): "10151800 91",
    ("usage_events", "sqlite_autoindex_usage_events_1"): "10134300 1",
    ("tenants", "sqlite_autoindex_tenants_1"): "1000 1",
}


@pytest.fixture
def sampled(tmp_path: Path) -> Iterator[Database]:
    url = migrated_sqlite(tmp_path / "loramux.db")
    database = Database(url)
    database.refresh_statistics()
    with database.write() as connection:
        connection.exec_driver_sql("DELETE FROM sqlite_stat1")
        for (table, index), sample in SAMPLES.items():
            connection.exec_driver_sql("INSERT INTO sqlite_stat1 VALUES (?, ?, ?)", (table, index, sample))
    database.close()
    database = Database(url)
    yield database
    database.close()


def plan(database: Database, ask: Any) -> str:
    asked: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        asked.append((statement, parameters))

    event.listen(database._engine, "before_cursor_execute", note)
    try:
        ask()
    finally:
        event.remove(database._engine, "before_cursor_execute", note)
    statement, parameters = next((text, values) for text, values in asked if text.startswith("SELECT"))
    with database.read() as connection:
        return "\n".join(row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters))


@pytest.mark.parametrize("group_by", [(), ("key",), ("model",), ("version", "status")], ids="+".join)
def test_sums_of_a_tenant_use_the_tenant_index(sampled: Database, group_by: tuple[str, ...]) -> None:
    tenant = Tenants(sampled).create("acme")
    query = UsageQuery(tenant_id=tenant.id, start_us=5, end_us=40 * DAY_US, group_by=group_by)
    for ask in (lambda: answer(sampled, query), lambda: largest(sampled, query, 5)):
        steps = plan(sampled, ask)
        assert "ix_usage_rollups_tenant_span_start (tenant_id=? AND grain=? AND span_us=? AND start_us>?" in steps
        assert "usage_rollups USING PRIMARY KEY" not in steps


def test_page_of_requests_scans_an_index_without_sorting(sampled: Database) -> None:
    steps = plan(sampled, lambda: Ledger(sampled).events(None, 20))
    assert "SCAN usage_events USING INDEX" in steps
    assert "TEMP B-TREE" not in steps


def test_planner_hints_are_only_for_sqlite() -> None:
    query = UsageQuery(tenant_id="ten_1", start_us=5, end_us=40 * DAY_US)
    statement: Select[Any] = select_all(query, ())
    assert "likelihood" not in str(statement.compile(dialect=postgresql.dialect()))
