from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event, text

from loramux.migrations.database import LONGEST_READ_S, Database, ReadTooLong
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.errors import InvalidRequest
from loramux.platform.ledger import query as usage_query
from loramux.platform.ledger.grains import DAY_US, HOUR_US
from loramux.platform.ledger.query import UsageQuery
from loramux.platform.ledger.report import answer, largest
from tests.adversary.many_end_users import add_end_users

NUM_USERS = 60
FOR_EVER = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000000000) SELECT count(*) FROM n"


def statements_of(database: Database, ask: Callable[[], object]) -> list[str]:
    asked: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        asked.append(statement)

    event.listen(database._engine, "before_cursor_execute", note)
    try:
        ask()
    finally:
        event.remove(database._engine, "before_cursor_execute", note)
    return [statement for statement in asked if statement.startswith("SELECT")]


def test_oversized_report_is_refused_before_it_is_read(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant, other = (Tenants(database).create(slug) for slug in ("acme", "initech"))
    for one in (tenant, other):
        add_end_users(database, one.id, NUM_USERS, days=3)
    now_us = database.now_us()

    def ask(top: int | None, **more: Any) -> int:
        query = UsageQuery(
            tenant_id=tenant.id, start_us=now_us - 20 * DAY_US, end_us=now_us, group_by=("end_user",), **more
        )
        return len(answer(database, query)) if top is None else len(largest(database, query, top).rows)

    cases: list[tuple[int | None, dict[str, Any]]] = [
        (None, {}),
        (None, {"bucket": "1d"}),
        (None, {"bucket": "1d", "timezone": "Asia/Kolkata"}),
        (1000, {}),
    ]
    for top, more in cases:
        # Each request has its own end user, so there are as many sums and events as requests.
        monkeypatch.setattr(usage_query, "MAX_SUMMED_BY_END_USER", NUM_USERS)
        assert ask(top, **more) == NUM_USERS
        monkeypatch.setattr(usage_query, "MAX_SUMMED_BY_END_USER", NUM_USERS - 1)

        def refused(top: int | None = top, more: dict[str, Any] = more) -> None:
            with pytest.raises(InvalidRequest, match="shorter range") as told:
                ask(top, **more)
            assert (told.value.code, told.value.param) == ("report_too_large", "start")

        assert len(statements_of(database, refused)) == 1, "the rows were counted and not read"


def test_groups_other_than_end_users_have_their_own_bound(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = Tenants(database).create("acme")
    add_end_users(database, tenant.id, NUM_USERS, days=3)
    now_us = database.now_us()
    query = UsageQuery(tenant_id=tenant.id, start_us=now_us - DAY_US, end_us=now_us, group_by=("key", "model"))
    monkeypatch.setattr(usage_query, "MAX_SUMMED_BY_END_USER", 1)
    assert len(answer(database, query)) == 1
    monkeypatch.setattr(usage_query, "MAX_SUMMED", 1)
    with pytest.raises(InvalidRequest, match="shorter range"):
        answer(database, query)


def test_slow_read_is_interrupted(database: Database) -> None:
    with pytest.raises(ReadTooLong), database.read(0.05) as connection:
        connection.execute(text(FOR_EVER))
    # The next read on the same connection has no time limit.
    with database.read() as connection:
        assert connection.execute(text(FOR_EVER.replace("1000000000", "300000"))).scalar() == 300_000


def test_reports_are_read_within_the_documented_time(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    tenant = Tenants(database).create("acme")
    now_us = database.now_us()
    query = UsageQuery(tenant_id=tenant.id, start_us=now_us - DAY_US, end_us=now_us, group_by=("key",))
    limits: list[float | None] = []
    read = database.read

    def noted(within_s: float | None = None) -> Any:
        limits.append(within_s)
        return read(within_s)

    monkeypatch.setattr(database, "read", noted)
    answer(database, query)
    largest(database, query, 5)
    assert limits == [LONGEST_READ_S] * 2


def test_report_statements_are_not_cached(database: Database) -> None:
    """Reports rarely have the same range, so cached statements would only take memory."""
    tenant = Tenants(database).create("acme")
    add_end_users(database, tenant.id, NUM_USERS, days=3)
    now_us = database.now_us()

    def ask(hours: int) -> None:
        query = UsageQuery(
            tenant_id=tenant.id, start_us=now_us - hours * HOUR_US, end_us=now_us, group_by=("end_user",)
        )
        assert answer(database, query)
        assert largest(database, query, 5).rows

    ask(30)
    before = len(database._engine._compiled_cache or ())
    for hours in (31, 57, 83):
        ask(hours)
    assert len(database._engine._compiled_cache or ()) == before
