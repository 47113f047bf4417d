"""The step that adds service tiers keeps the sums of earlier usage, which then has the tier `default`."""

from __future__ import annotations

from alembic import command
from sqlalchemy import select

from loramux.migrations.database import Database
from loramux.migrations.schema import api_keys, tenants, usage_series
from loramux.platform.ledger.events import Ledger
from loramux.platform.ledger.rollups import UsageRollups

HOUR_US, DAY_US = 3_600_000_000, 86_400_000_000
SERIES = "tenant_id, api_key_id, adapter_id, adapter_version_id, model, base, endpoint, end_user, status"
AMOUNTS = "requests, prompt_tokens, cached_tokens, completion_tokens, cost_nanos"
FINEST = "'ten_1', 'key_1', '', '', 'base', 'base', 'chat', '', 'completed'"
BY_KEY = "'ten_1', 'key_1', '', '', '', '', '', '', ''"
ALL = "'', '', '', '', '', 'base', 'chat', '', 'completed'"


def test_earlier_usage_has_the_default_tier(database_url: str) -> None:
    database = Database(database_url)
    command.upgrade(database._alembic_config(), "0030")
    with database.write() as connection:
        for statement in _rows():
            connection.exec_driver_sql(statement)
    database.upgrade()
    with database.read() as connection:
        series = connection.execute(
            select(usage_series.c.api_key_id, usage_series.c.endpoint, usage_series.c.service_tier)
        )
        assert {tuple(row) for row in series} == {("key_1", "chat", "default"), ("key_1", "", ""), ("", "chat", "")}
        tiers = select(tenants.c.max_service_tier, tenants.c.default_service_tier)
        assert [tuple(row) for row in connection.execute(tiers)] == [("default", "default")]
        own = select(api_keys.c.max_service_tier, api_keys.c.default_service_tier)
        assert [tuple(row) for row in connection.execute(own)] == [(None, None)]
    ledger, rollups = Ledger(database), UsageRollups(database)
    for _ in range(2):
        (total,) = ledger.report("ten_1", DAY_US, 2 * DAY_US, group_by=("service_tier",))
        assert (total.service_tier, total.requests, total.prompt_tokens, total.cost_nanos) == ("default", 3, 35, 7)
        (everyone,) = ledger.report(None, DAY_US, 2 * DAY_US, group_by=("endpoint",))
        assert (everyone.endpoint, everyone.requests) == ("chat", 3)
        # The event that was waiting continues the series of the earlier ones.
        rollups.fold_all()
    with database.read() as connection:
        finest = select(usage_series.c.id).where(usage_series.c.service_tier == "default")
        assert [row.id for row in connection.execute(finest)] == [1001]
    database.close()


def _rows() -> list[str]:
    sums = [
        f"INSERT INTO usage_series (id, {SERIES}) VALUES ({number}, {values})"
        for number, values in ((1001, FINEST), (1002, BY_KEY), (1003, ALL))
    ]
    for grain, number, tenant in ((5, 1001, "ten_1"), (2, 1002, "ten_1"), (0, 1003, "")):
        for span_us in (HOUR_US, DAY_US):
            sums.append(
                f"INSERT INTO usage_rollups (grain, span_us, start_us, tenant_id, series_id, {AMOUNTS})"
                f" VALUES ({grain}, {span_us}, {DAY_US}, '{tenant}', {number}, 2, 30, 1, 8, 5)"
            )
    return [
        "INSERT INTO tenants (id, slug, display_name, state, weight, isolation_secret, created_us)"
        " VALUES ('ten_1', 'acme', 'acme', 'active', 1, '', 1)",
        "INSERT INTO api_keys (id, tenant_id, public_id, secret_sha256, name, scopes, created_us)"
        " VALUES ('key_1', 'ten_1', 'public', '', 'test', '[]', 1)",
        *sums,
        "INSERT INTO usage_events (request_id, tenant_id, api_key_id, model, base, endpoint, status, prompt_tokens,"
        " cached_tokens, completion_tokens, cost_nanos, started_us, finished_us, batch_id) VALUES"
        f" ('req_1', 'ten_1', 'key_1', 'base', 'base', 'chat', 'completed', 5, 0, 1, 2, 0, {DAY_US + 7}, 9)",
        f"INSERT INTO usage_batches (id, at_us) VALUES (9, {DAY_US + 7})",
    ]
