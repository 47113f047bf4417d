from __future__ import annotations

import time

from sqlalchemy import text

from loramux.migrations.database import Database
from loramux.platform.ledger.grains import DAY_US
from tests.platform.ledger.rebuilt_rollups import rebuild_all_rollups

_EVENTS = """
INSERT INTO usage_events (request_id, tenant_id, api_key_id, model, endpoint, status, prompt_tokens, cached_tokens,
    completion_tokens, started_us, finished_us, base, end_user)
SELECT {request_id}, :tenant_id, 'key_' || :tag, 'base', 'chat.completions', 'completed', 100, 0, 1 + i % 300,
    :start_us + i * :step_us, :start_us + i * :step_us, 'base', 'user-' || i
FROM {numbers}
"""
_NUMBERS = {
    True: "(WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < :num_events) SELECT i FROM n)",
    False: "generate_series(CAST(0 AS bigint), :num_events - 1) AS n(i)",
}
_REQUEST_ID = {True: "printf('req_%s%024x', :tag, i)", False: "'req_' || :tag || lpad(to_hex(i), 24, '0')"}


def add_end_users(database: Database, tenant_id: str, num_events: int, days: int = 7) -> None:
    """Insert `num_events` requests from the last `days` days, each with a different end user. Then rebuild the rollups.

    No server may use the database while this runs.
    """
    start_us = database.now_us() - days * DAY_US
    is_sqlite = database.is_sqlite
    values = {
        "tenant_id": tenant_id,
        "tag": f"{time.time_ns() % 16**8:08x}",
        "num_events": num_events,
        "start_us": start_us,
        "step_us": days * DAY_US // num_events,
    }
    entered = text(_EVENTS.format(numbers=_NUMBERS[is_sqlite], request_id=_REQUEST_ID[is_sqlite]))
    with database.write() as connection:
        connection.execute(entered, values)
        for statement in rebuild_all_rollups():
            connection.execute(text(statement))
    database.refresh_statistics()
