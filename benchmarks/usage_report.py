"""How long does a report over a ledger of ten million requests take?

A month of settled requests of a thousand tenants, few of which make most of them, is written with SQL of the database's
own, folded into rollups by what a gateway runs, and asked what a console and an operator ask. Before anything is
measured the reports must be equal, to the token and the nano, to sums over the events themselves.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table
from sqlalchemy import func, insert, select, text

from benchmarks.databases import KINDS, open_database
from benchmarks.gpu_bench import CheckError
from benchmarks.machine import add_allow_busy, describe, require_idle
from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.ledger import Ledger
from loramux.platform.usage_grains import AMOUNTS, DAY_US, HOUR_US
from loramux.platform.usage_report import UsageQuestion, answer
from loramux.platform.usage_rollups import UsageRollups

FIRST_US = 1_790_812_800_000_000
MONTH_US = 30 * DAY_US
PER_BATCH = 100
INSERTED_AT_ONCE = 500_000
FOLDED_AT_ONCE = 1000

# u is spread evenly over [0, 1) and its square picks the tenant, so that the first tenth makes a third of the requests.
_INSERT = """
INSERT INTO usage_events (request_id, tenant_id, api_key_id, adapter_id, adapter_version_id, model, endpoint, status,
    prompt_tokens, cached_tokens, completion_tokens, started_us, finished_us, first_token_us, base, end_user,
    cost_nanos, batch_id)
SELECT {request_id}, 'ten_' || tenant, 'key_' || tenant || '_' || (i % 2),
    CASE WHEN i % 4 = 0 THEN NULL ELSE 'ada_' || tenant || '_' || (i % 4) END,
    CASE WHEN i % 4 = 0 THEN NULL ELSE 'adv_' || tenant || '_' || (i % 4) END,
    CASE WHEN i % 4 = 0 THEN 'base' ELSE 'tenant-' || tenant || '/adapter-' || (i % 4) || '@1' END,
    'chat.completions', CASE WHEN i % 41 = 0 THEN 'aborted' ELSE 'completed' END,
    100 + i % 900, i % 100, 1 + i % 300, at_us - 1500000, at_us, at_us - 1000000, 'base', 'user-' || (i % 50),
    (100 + i % 900) * 150 + (1 + i % 300) * 600, 1 + i / {per_batch}
FROM (SELECT i, {first} + (i / {per_batch}) * {step} AS at_us,
      {tenants} * u * u / (1048576 * CAST(1048576 AS bigint)) AS tenant
      FROM (SELECT i, (i * 7919) % 1048576 AS u FROM {numbers}) AS spread) AS made
"""
_NUMBERS = {
    "sqlite": "(WITH RECURSIVE n(i) AS (SELECT {low} UNION ALL SELECT i + 1 FROM n WHERE i + 1 < {high})"
    " SELECT i FROM n)",
    "postgresql": "generate_series(CAST({low} AS bigint), {high} - 1) AS n(i)",
}
_REQUEST_ID = {"sqlite": "printf('req_%032x', i)", "postgresql": "'req_' || lpad(to_hex(i), 32, '0')"}


def main() -> None:
    arguments = _arguments()
    require_idle(arguments.allow_busy)
    results = []
    for kind in arguments.databases:
        with open_database(kind) as database:
            results.append({"database": kind, **_measure(kind, database, arguments)})
            _print(results[-1])
    document = {"machine": describe(), "events": arguments.events, "tenants": arguments.tenants, "results": results}
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=10_000_000, help="about 0.9 KB of disk each while it runs")
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--databases", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--repeats", type=int, default=20, help="of each report")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    add_allow_busy(parser)
    return parser.parse_args()


def _measure(kind: str, database: Database, arguments: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    _fill(kind, database, arguments.events, arguments.tenants)
    filled = time.perf_counter()
    rollups = UsageRollups(database)
    while rollups.fold(FOLDED_AT_ONCE):
        pass
    folded = time.perf_counter()
    _settle_down(kind, database)
    with database.read() as connection:
        num_rollups = int(connection.execute(select(func.count()).select_from(schema.usage_rollups)).scalar_one())
    _check(database)
    figures = {name: _timed(ask, arguments.repeats) for name, ask in _reports(database).items()}
    return {
        "write_s": round(filled - started, 1),
        "fold_s": round(folded - filled, 1),
        "folded_events_s": round(arguments.events / (folded - filled)),
        "rollup_rows": num_rollups,
        "database_bytes": _size(kind, database),
        "reports": figures,
    }


def _fill(kind: str, database: Database, num_events: int, num_tenants: int) -> None:
    tenants = [
        {"id": f"ten_{number}", "slug": f"tenant-{number}", "display_name": f"{number}", "state": "active", "weight": 1}
        for number in range(num_tenants)
    ]
    with database.write() as connection:
        connection.execute(
            insert(schema.tenants), [{**one, "isolation_secret": bytes(32), "created_us": 0} for one in tenants]
        )
    step = MONTH_US * PER_BATCH // num_events
    for low in range(0, num_events, INSERTED_AT_ONCE):
        high = min(num_events, low + INSERTED_AT_ONCE)
        statement = _INSERT.format(
            request_id=_REQUEST_ID[kind],
            numbers=_NUMBERS[kind].format(low=low, high=high),
            first=FIRST_US,
            step=step,
            per_batch=PER_BATCH,
            tenants=num_tenants,
        )
        batches = [{"id": 1 + i, "at_us": FIRST_US + i * step} for i in range(low // PER_BATCH, -(-high // PER_BATCH))]
        with database.write() as connection:
            connection.execute(text(statement))
            connection.execute(insert(schema.usage_batches), batches)


def _settle_down(kind: str, database: Database) -> None:
    """What PostgreSQL does by itself in time: statistics. SQLite runs without any, as with us."""
    if kind == "postgresql":
        with database.write() as connection:
            connection.execute(text("ANALYZE"))


def _check(database: Database) -> None:
    """Reports must equal what the events sum up to."""
    events, tenants = schema.usage_events, schema.tenants
    sums = [func.count(), *(func.sum(events.c[name]) for name in AMOUNTS[1:])]
    end_us = FIRST_US + MONTH_US
    day = (events.c.finished_us - events.c.finished_us % DAY_US).label("day")
    cut = (FIRST_US + 3 * HOUR_US + 17, end_us - 5 * DAY_US - 1_234_567)
    in_cut = (events.c.finished_us >= cut[0]) & (events.c.finished_us < cut[1])
    cases = [
        (("tenant", "status"), None, (FIRST_US, end_us), select(tenants.c.slug, events.c.status, *sums)
         .join(tenants, tenants.c.id == events.c.tenant_id).group_by(tenants.c.slug, events.c.status)),
        ((), "1d", (FIRST_US, end_us), select(day, *sums).group_by(day)),
        (("model",), None, cut, select(events.c.model, *sums).where(in_cut).group_by(events.c.model)),
    ]  # fmt: skip
    for group_by, bucket, (start_us, end), direct in cases:
        asked = UsageQuestion(tenant_id=None, start_us=start_us, end_us=end, bucket=bucket, group_by=group_by)
        rows = answer(database, asked)
        reported = {
            (*((row.start_us,) if bucket else ()), *(getattr(row, name) for name in group_by)): tuple(
                getattr(row, name) for name in AMOUNTS
            )
            for row in rows
        }
        with database.read() as connection:
            num_keys = len(group_by) + bool(bucket)
            expected = {tuple(row[:num_keys]): tuple(map(int, row[num_keys:])) for row in connection.execute(direct)}
        if reported != expected:
            raise CheckError(f"the report by {group_by or bucket} is not the sum of the events")


def _reports(database: Database) -> dict[str, Callable[[], Any]]:
    """What is asked, in words; the ledger's newest request finished at the month's end."""
    now_us, ledger = FIRST_US + MONTH_US, Ledger(database)
    largest = "ten_0"

    def ask(length_us: int, **more: Any) -> Callable[[], Any]:
        fields: dict[str, Any] = {"tenant_id": None, **more}
        start_us = fields.pop("start_us", now_us - length_us)
        return lambda: answer(database, UsageQuestion(start_us=start_us, end_us=now_us + 1, **fields))

    return {
        "all tenants, 30 days": ask(MONTH_US),
        "all tenants, 30 days by day": ask(MONTH_US, bucket="1d"),
        "all tenants, 30 days by day in Berlin": ask(MONTH_US, bucket="1d", timezone="Europe/Berlin"),
        "all tenants, 30 days by tenant": ask(MONTH_US, group_by=("tenant",)),
        "all tenants, 7 days by hour": ask(7 * DAY_US, bucket="1h"),
        "all tenants, 24 hours by status": ask(DAY_US, group_by=("status",)),
        "all tenants, 24 hours by tenant": ask(DAY_US, group_by=("tenant",)),
        "all tenants, an hour by minute": ask(HOUR_US, bucket="1m"),
        "a tenant, 30 days by day and model": ask(MONTH_US, tenant_id=largest, bucket="1d", group_by=("model",)),
        "a tenant, 30 days by day in Berlin": ask(MONTH_US, tenant_id=largest, bucket="1d", timezone="Europe/Berlin"),
        "a tenant, 30 days by day in Kolkata": ask(MONTH_US, tenant_id=largest, bucket="1d", timezone="Asia/Kolkata"),
        "a tenant, 7 days by hour": ask(7 * DAY_US, tenant_id=largest, bucket="1h"),
        "a tenant, 30 days by key, version and status": ask(
            MONTH_US, tenant_id=largest, group_by=("key", "version", "status")
        ),
        "a tenant, 24 hours by end user": ask(DAY_US, tenant_id=largest, group_by=("end_user",)),
        "a tenant, 24 hours by minute": ask(DAY_US, tenant_id=largest, bucket="1m"),
        "a page of all events": lambda: ledger.events(None, 100),
        "a page of a tenant's events": lambda: ledger.events(largest, 100),
        "a part of a tenant's export": lambda: ledger.export(largest, FIRST_US + 9 * DAY_US, now_us),
    }


def _timed(ask: Callable[[], Any], repeats: int) -> dict[str, float]:
    times = []
    # One more than is counted, which finds statements not yet compiled and pages not yet read.
    for _ in range(repeats + 1):
        started = time.perf_counter()
        ask()
        times.append((time.perf_counter() - started) * 1e3)
    p50, p95 = np.percentile(times[1:], [50, 95])
    return {"p50_ms": round(float(p50), 1), "p95_ms": round(float(p95), 1), "first_ms": round(times[0], 1)}


def _size(kind: str, database: Database) -> int:
    with database.read() as connection:
        if kind == "postgresql":
            return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        return int(pages) * int(connection.exec_driver_sql("PRAGMA page_size").scalar_one())


def _print(result: dict[str, Any]) -> None:
    title = f"{result['database']}: {result['database_bytes'] / 1e9:.1f} GB, {result['rollup_rows']} rollup rows"
    table = Table(title=title)
    columns: Sequence[str] = ("p50_ms", "p95_ms", "first_ms")
    for column in ("report", *columns):
        table.add_column(column, justify="left" if column == "report" else "right")
    for name, figures in result["reports"].items():
        table.add_row(name, *(str(figures[column]) for column in columns))
    console = Console()
    console.print(table)
    console.print(f"written in {result['write_s']} s, folded in {result['fold_s']} s")


if __name__ == "__main__":
    main()
