from __future__ import annotations

from sqlalchemy import select

from loramux.migrations.database import Database
from loramux.migrations.schema import usage_rollups
from tests.platform.ledger.rollup_checks import rebuild_rollups

HOUR_US, DAY_US = 3_600_000_000, 86_400_000_000


def test_existing_usage_is_rolled_up(database: Database) -> None:
    with database.write() as connection:
        connection.exec_driver_sql(
            "INSERT INTO tenants (id, slug, display_name, state, weight, isolation_secret, created_us)"
            " VALUES ('ten_1', 'acme', 'acme', 'active', 1, '', 1)"
        )
        for name, finished_us, tokens in (
            ("req_1", DAY_US + 5, 10),
            ("req_2", DAY_US + HOUR_US - 1, 20),
            ("req_3", DAY_US + HOUR_US, 40),
        ):
            connection.exec_driver_sql(
                "INSERT INTO usage_events (request_id, tenant_id, api_key_id, model, endpoint, status, prompt_tokens,"
                " cached_tokens, completion_tokens, started_us, finished_us) VALUES"
                f" ('{name}', 'ten_1', 'key_1', 'base', 'completions', 'completed', {tokens}, 1, 2, 0, {finished_us})"
            )
        connection.exec_driver_sql(
            "INSERT INTO usage_adjustments (id, request_id, tenant_id, prompt_tokens, cached_tokens, completion_tokens,"
            f" created_us) VALUES ('adj_1', 'req_1', 'ten_1', -4, 0, 3, {DAY_US + 2 * HOUR_US})"
        )
    rebuild_rollups(database)
    rollups = usage_rollups.c
    with database.read() as connection:
        rows = connection.execute(
            select(rollups.grain, rollups.span_us, rollups.start_us - DAY_US, rollups.requests, rollups.prompt_tokens)
            .where(rollups.tenant_id == "ten_1")
            .order_by(rollups.grain, rollups.span_us, rollups.start_us)
        ).all()
        everybody = connection.execute(
            select(rollups.requests, rollups.completion_tokens).where(
                rollups.tenant_id == "", rollups.span_us == DAY_US
            )
        ).one()
    hours = [(HOUR_US, 0, 2, 30), (HOUR_US, HOUR_US, 1, 40), (HOUR_US, 2 * HOUR_US, 0, -4)]
    # The first week began one day before the epoch, as did the first spans of 2, 4, 8 and 16 days.
    of_day, of_week = (DAY_US, 0, 3, 66), (7 * DAY_US, -DAY_US, 3, 66)
    by_grain = {
        1: [*hours, of_day, of_week],
        2: [*hours, of_day, of_week],
        3: [*hours, (6 * HOUR_US, 0, 3, 66), of_day, *((span * DAY_US, -DAY_US, 3, 66) for span in (2, 4, 8, 16))],
        4: [of_day],
        5: [*hours, of_day],
    }
    assert [tuple(row) for row in rows] == [(grain, *row) for grain, found in by_grain.items() for row in found]
    assert tuple(everybody) == (3, 9)
