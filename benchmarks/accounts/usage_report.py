"""Measures how long reports over a ledger of ten million requests take.

The benchmark times the reports that the console and operators request, over a month of requests from a thousand tenants
(usage_world.py). Before timing, the amounts in three reports must exactly equal sums over the events. The rate
at which a gateway folds settlements into the rollups is measured on a smaller ledger. The gateway's rollups must
equal those that the database computes in SQL from the same ledger.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.progress import Progress
from sqlalchemy import func, select, text

from benchmarks.accounts.databases import open_database_at
from benchmarks.accounts.registry_world import World
from benchmarks.accounts.usage_world import (
    MONTH_US,
    PER_BATCH,
    UsageWorld,
    add_usage_world,
    describe_usage_world,
    make_usage_world,
    open_usage_world,
)
from benchmarks.answers import CheckError
from benchmarks.harness import begin, new_parser, percentiles_ms, reports_failure, require_below
from benchmarks.machine import busy_share
from benchmarks.tables import table
from loramux.engine.server.gc_freeze import freeze_gc
from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.ledger.events import Ledger
from loramux.platform.ledger.grains import AMOUNTS, DAY_US, HOUR_US
from loramux.platform.ledger.query import UsageQuery
from loramux.platform.ledger.report import UsageRow, answer, largest
from loramux.platform.ledger.rollups import UsageRollups
from tests.platform.ledger.rebuilt_rollups import rebuild_all_rollups

TARGET_MS = 200.0
TOP = 200
"""Number of groups in a `largest` report, twice as many as the console shows."""
ASKED_US = MONTH_US - 17 * HOUR_US
"""Length of the time range of most reports over "a month", in microseconds: nearly all of the data. The range starts
and ends mid-hour.
"""
FOLDED_WORLD = World(50, 4, 2)


@reports_failure
def main(argv: Sequence[str] | None = None) -> None:
    parser = new_parser("accounts.usage_report", __doc__)
    add_usage_world(parser)
    parser.add_argument("--repeats", type=int, default=20, help="timed runs of each report")
    parser.add_argument("--fold", type=int, default=50_000, help="events in the smaller ledger for timing the fold")
    run = begin(parser.parse_args(argv))
    arguments = run.arguments
    world = World(arguments.tenants, arguments.adapters_each, 10)
    results = []
    with Progress(console=run.console) as progress:
        for kind in arguments.databases:
            with open_usage_world(kind, arguments.folder, arguments.events, world, progress) as (database, made):
                figures = _measure(kind, database, made, arguments.repeats, progress)
            with open_database_at(kind) as (database, _):
                figures["folded_events_s"] = _fold(kind, database, arguments.fold, progress)
            results.append({"database": kind, **figures})
    for result in results:
        title = f"{result['database']}: {result['database_bytes'] / 1e9:.1f} GB, {result['rollup_rows']} rollup rows"
        shown = {**result["reports"], **result["whole_lists"]}
        rows = [(name, *map(str, figures.values())) for name, figures in shown.items()]
        run.console.print(table(title, ("report", *next(iter(shown.values()))), rows))
        made_s, folded = result["made_s"], result["folded_events_s"]
        run.console.print(f"created in {made_s} s; a gateway folds {folded} events/s")
    load = round(os.getloadavg()[0], 1)
    run.write({"load_1m_after": load, **describe_usage_world(arguments), "results": results})
    p95s = {
        f"{result['database']}: {name}": figures["p95_ms"]
        for result in results
        for name, figures in result["reports"].items()
    }
    require_below(TARGET_MS, p95s)


def _measure(kind: str, database: Database, made: UsageWorld, repeats: int, progress: Progress) -> dict[str, Any]:
    with database.read() as connection:
        num_rollups = int(connection.execute(select(func.count()).select_from(schema.usage_rollups)).scalar_one())
    _check(database, made)
    freeze_gc()

    def timed(asked: dict[str, Callable[[], Any]], what: str) -> dict[str, dict[str, float]]:
        tracked = progress.track(asked.items(), description=f"{kind}: {what}")
        return {name: _timed(ask, repeats) for name, ask in tracked}

    reports, lists = timed(_reports(database, made), "reports"), timed(_whole_lists(database, made), "whole lists")
    return {
        "made_s": made.made_s,
        "rollup_rows": num_rollups,
        "database_bytes": _size(kind, database),
        "busy_share": round(busy_share(), 2),
        "reports": reports,
        "whole_lists": lists,
    }


def _fold(kind: str, database: Database, num_events: int, progress: Progress) -> int:
    """Measure how many events per second a gateway folds. Raises CheckError if the rollups differ from the ledger."""
    make_usage_world(kind, database, num_events, FOLDED_WORLD, progress, is_folded=False)
    rollups, started = UsageRollups(database), time.perf_counter()
    with_bar = progress.add_task(f"{kind}: fold", total=num_events)
    while folded := rollups.fold():
        progress.advance(with_bar, folded * PER_BATCH)
    took_s = time.perf_counter() - started
    by_gateway = _all_rollups(database)
    with database.write() as connection:
        for statement in rebuild_all_rollups():
            connection.execute(text(statement))
    if by_gateway != _all_rollups(database):
        raise CheckError("the gateway's rollups differ from those computed by the database")
    return round(num_events / took_s)


def _all_rollups(database: Database) -> set[tuple[Any, ...]]:
    rollups, series = schema.usage_rollups.c, schema.usage_series.c
    columns = [column for column in (*rollups, *series) if column.name not in ("id", "series_id")]
    with database.read() as connection:
        return {tuple(row) for row in connection.execute(select(*columns).where(series.id == rollups.series_id))}


def _check(database: Database, made: UsageWorld) -> None:
    events, tenants = schema.usage_events, schema.tenants
    sums = [func.count(), *(func.sum(events.c[name]) for name in AMOUNTS[1:])]
    first_us, end_us = made.first_us, made.end_us
    day = (events.c.finished_us - events.c.finished_us % DAY_US).label("day")
    cut = (first_us + 3 * HOUR_US + 17, end_us - 5 * DAY_US - 1_234_567)
    in_cut = (events.c.finished_us >= cut[0]) & (events.c.finished_us < cut[1])
    cases = [
        (("tenant", "status"), None, (first_us, end_us), select(tenants.c.slug, events.c.status, *sums)
         .join(tenants, tenants.c.id == events.c.tenant_id).group_by(tenants.c.slug, events.c.status)),
        ((), "1d", (first_us, end_us), select(day, *sums).group_by(day)),
        (("model",), None, cut, select(events.c.model, *sums).where(in_cut).group_by(events.c.model)),
    ]  # fmt: skip
    for group_by, bucket, (start_us, end), direct in cases:
        asked = UsageQuery(tenant_id=None, start_us=start_us, end_us=end, bucket=bucket, group_by=group_by)
        rows = answer(database, asked)
        if bucket is None:
            _check_largest(database, asked, rows)
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
            raise CheckError(f"the report by {group_by or bucket} does not equal the sum of the events")


def _check_largest(database: Database, asked: UsageQuery, rows: Sequence[UsageRow]) -> None:
    found = largest(database, asked, TOP)
    by_tokens = sorted((row.prompt_tokens + row.completion_tokens for row in rows), reverse=True)
    if [row.prompt_tokens + row.completion_tokens for row in found.rows] != by_tokens[:TOP]:
        raise CheckError(f"the largest groups by {asked.group_by} differ from those of the full report")
    if found.num_groups != len(rows) or found.total.requests != sum(row.requests for row in rows):
        raise CheckError(f"the largest groups by {asked.group_by} have the wrong totals")


def _now_us(made: UsageWorld) -> int:
    """A time that is not on a day or hour boundary."""
    return made.end_us - 11 * HOUR_US - 1_234_567_890


def _query(made: UsageWorld, length_us: int, **more: Any) -> UsageQuery:
    now_us = _now_us(made)
    return UsageQuery(**{"tenant_id": None, "start_us": now_us - length_us, "end_us": now_us + 1, **more})


def _whole_lists(database: Database, made: UsageWorld) -> dict[str, Callable[[], Any]]:
    """Reports with thousands of rows, which are meant for export and have no target."""

    def ask(group_by: tuple[str, ...]) -> Callable[[], Any]:
        return lambda: answer(database, _query(made, ASKED_US, group_by=group_by))

    return {
        f"all tenants, a month by {' and '.join(group_by)}, every one": ask(group_by)
        for group_by in (("key",), ("adapter",), ("tenant", "model"))
    }


def _reports(database: Database, made: UsageWorld) -> dict[str, Callable[[], Any]]:
    ledger, of_tenant, now_us = Ledger(database), made.tenant_ids[0], _now_us(made)

    def ask(length_us: int, **more: Any) -> Callable[[], Any]:
        query = _query(made, length_us, **more)
        return lambda: answer(database, query)

    def ask_largest(length_us: int, *group_by: str) -> Callable[[], Any]:
        query = _query(made, length_us, group_by=group_by)
        return lambda: largest(database, query, TOP)

    return {
        "all tenants, a month": ask(ASKED_US),
        "all tenants, a month by day": ask(ASKED_US, bucket="1d"),
        "all tenants, a month by day in Berlin": ask(ASKED_US, bucket="1d", timezone="Europe/Berlin"),
        "all tenants, a month by day in Kolkata": ask(ASKED_US, bucket="1d", timezone="Asia/Kolkata"),
        "all tenants, a month by tenant": ask(ASKED_US, group_by=("tenant",)),
        "all tenants, a month by tenant and status": ask(ASKED_US, group_by=("tenant", "status")),
        f"all tenants, a month by key, {TOP} largest": ask_largest(ASKED_US, "key"),
        f"all tenants, a month by tenant and model, {TOP} largest": ask_largest(ASKED_US, "tenant", "model"),
        f"all tenants, a month by adapter, {TOP} largest": ask_largest(ASKED_US, "adapter"),
        f"all tenants, 7 days by model, {TOP} largest": ask_largest(7 * DAY_US, "model"),
        f"all tenants, 24 hours by model, {TOP} largest": ask_largest(DAY_US, "model"),
        "all tenants, 7 days by hour": ask(7 * DAY_US, bucket="1h"),
        "all tenants, 24 hours by status": ask(DAY_US, group_by=("status",)),
        "all tenants, 24 hours by tenant": ask(DAY_US, group_by=("tenant",)),
        "all tenants, an hour by minute": ask(HOUR_US, bucket="1m"),
        "all tenants, a day by minute": ask(DAY_US, bucket="1m"),
        "a tenant, a month by day and model": ask(ASKED_US, tenant_id=of_tenant, bucket="1d", group_by=("model",)),
        "a tenant, a month by day in Berlin": ask(ASKED_US, tenant_id=of_tenant, bucket="1d", timezone="Europe/Berlin"),
        "a tenant, a month by day in Kolkata": ask(ASKED_US, tenant_id=of_tenant, bucket="1d", timezone="Asia/Kolkata"),
        "a tenant, 7 days by hour": ask(7 * DAY_US, tenant_id=of_tenant, bucket="1h"),
        "a tenant, a month by key, version and status": ask(
            MONTH_US, tenant_id=of_tenant, group_by=("key", "version", "status")
        ),
        "a tenant, a month by end user": ask(ASKED_US, tenant_id=of_tenant, group_by=("end_user",)),
        "a tenant, 24 hours by end user": ask(DAY_US, tenant_id=of_tenant, group_by=("end_user",)),
        "a tenant, 24 hours by minute": ask(DAY_US, tenant_id=of_tenant, bucket="1m"),
        "a page of all events": lambda: ledger.events(None, 100),
        "a page of a tenant's events": lambda: ledger.events(of_tenant, 100),
        "a part of a tenant's export": lambda: ledger.export(of_tenant, made.first_us + 9 * DAY_US, now_us),
    }


def _timed(ask: Callable[[], Any], repeats: int) -> dict[str, float]:
    times = []
    # The first run compiles statements and reads pages from disk, so it is reported separately.
    for _ in range(repeats + 1):
        started = time.perf_counter()
        ask()
        times.append(time.perf_counter() - started)
    return {**percentiles_ms(times[1:], 50, 95, digits=1), "first_ms": round(times[0] * 1e3, 1)}


def _size(kind: str, database: Database) -> int:
    with database.read() as connection:
        if kind == "postgresql":
            return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
        pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
        return int(pages) * int(connection.exec_driver_sql("PRAGMA page_size").scalar_one())


if __name__ == "__main__":
    raise SystemExit(main())
