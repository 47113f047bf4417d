"""A large company's registry and a month of its requests, generated in SQL and kept for the next run.

A few of the thousand tenants send most of the requests, and a few of each tenant's adapters receive most of that
tenant's requests. Every fourth request goes to the base model. Each tenant has two keys. The month ends at least a day
after its data is created, so that until then, reports over the last hour find ordinary traffic. Indexes and rollups are
built after all rows are inserted.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.progress import Progress
from sqlalchemy import Connection, insert, select, text
from sqlalchemy.schema import CreateIndex, DropIndex

from benchmarks.accounts.databases import KINDS, open_kept_database
from benchmarks.accounts.registry_world import World, fill, key_row
from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.platform.ledger.grains import DAY_US
from tests.platform.ledger.rebuilt_rollups import rebuild_all_rollups

MONTH_US = 30 * DAY_US
PER_BATCH = 100
INSERTED_AT_ONCE = 250_000

# u and v are uniform over [0, 2^20). Their squares select the tenant and the adapter.
_EVENTS = """
INSERT INTO usage_events (request_id, tenant_id, api_key_id, adapter_id, adapter_version_id, model, endpoint, status,
    prompt_tokens, cached_tokens, completion_tokens, started_us, finished_us, first_token_us, base, end_user,
    cost_nanos, batch_id)
SELECT {request_id}, t.id, CASE WHEN (i / 3) % 2 = 0 THEN t.key_0 ELSE t.key_1 END, a.adapter_id, a.version_id,
    coalesce(a.model, 'base'), 'chat.completions',
    CASE WHEN i % 41 = 0 THEN 'aborted' WHEN i % 97 = 0 THEN 'failed' ELSE 'completed' END,
    100 + i % 900, i % 100, 1 + i % 300, at_us - 1500000, at_us, at_us - 1000000, 'base', 'user-' || (i * 7 % 50),
    (100 + i % 900) * 150 + (1 + i % 300) * 600, batch_id
FROM (SELECT i, at_us, batch_id, {tenants} * u * u / 1099511627776 AS tenant,
          CASE WHEN i % 4 = 0 THEN -1 ELSE {adapters} * v * v / 1099511627776 END AS adapter
      FROM (SELECT i, {first} + (i / {per_batch}) * {step} AS at_us, 1 + i / {per_batch} AS batch_id,
                (i * 7919) % 1048576 AS u, (i * 104729 + 31) % 1048576 AS v
            FROM {numbers}) AS spread) AS made
JOIN made_tenants t ON t.number = tenant
LEFT JOIN made_adapters a ON a.number = tenant * 1000 + adapter
"""
_NUMBERS = {
    "sqlite": "(WITH RECURSIVE n(i) AS (SELECT {low} UNION ALL SELECT i + 1 FROM n WHERE i + 1 < {high})"
    " SELECT i FROM n)",
    "postgresql": "generate_series(CAST({low} AS bigint), {high} - 1) AS n(i)",
}
_REQUEST_ID = {"sqlite": "printf('req_%032x', i)", "postgresql": "'req_' || lpad(to_hex(i), 32, '0')"}
# The rows satisfy all foreign keys and can be regenerated after a crash, so skip the checks and do not sync.
_FAST_SETTINGS = {
    "sqlite": ("PRAGMA defer_foreign_keys=ON", "PRAGMA cache_size=-500000"),
    "postgresql": (
        "SET LOCAL session_replication_role = replica",
        "SET LOCAL synchronous_commit = off",
        "SET LOCAL work_mem = '256MB'",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageWorld:
    """The generated data. The month starts at `first_us`. Tenants are sorted from largest to smallest."""

    num_events: int
    first_us: int
    tenant_ids: tuple[str, ...]
    adapter_ids: tuple[str, ...]
    """Adapters of the largest tenant."""
    made_s: float

    @property
    def end_us(self) -> int:
        return self.first_us + MONTH_US


@contextmanager
def open_usage_world(
    kind: str, folder: Path, num_events: int, world: World, progress: Progress
) -> Iterator[tuple[Database, UsageWorld]]:
    """Open the database of this size in the folder, and generate its data first if needed. `kind` is one of
    databases.KINDS.
    """
    place = folder / f"{kind}-{num_events}-{world.num_tenants}"
    label = place / "made.json"
    if not label.exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
    with open_kept_database(kind, place) as (database, _):
        if not label.exists():
            database.upgrade()
            made = make_usage_world(kind, database, num_events, world, progress)
            label.write_bytes(msgspec.json.encode(made))
        # Every server refreshes the statistics when it starts.
        database.refresh_statistics()
        yield database, msgspec.json.decode(label.read_bytes(), type=UsageWorld)


def add_usage_world(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--adapters-each", type=int, default=10)
    parser.add_argument("--databases", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir(), "loramux-usage-worlds"),
        help="directory that keeps the databases for the next run; each needs about 0.8 KB of disk per event",
    )


def describe_usage_world(arguments: argparse.Namespace) -> dict[str, int]:
    num_adapters = arguments.tenants * arguments.adapters_each
    return {"events": arguments.events, "tenants": arguments.tenants, "adapters": num_adapters}


def make_usage_world(
    kind: str, database: Database, num_events: int, world: World, progress: Progress, is_folded: bool = True
) -> UsageWorld:
    """Fill an empty database. Unless `is_folded`, the rollups do not contain the events yet."""
    started = time.perf_counter()
    filled = fill(database, world)
    first_us = time.time_ns() // 1000 // DAY_US * DAY_US + 2 * DAY_US - MONTH_US
    indexes = sorted(schema.usage_events.indexes, key=lambda index: str(index.name))
    with database.write() as connection:
        _name(connection, filled.tenant_ids, filled.adapter_ids)
        for index in indexes:
            connection.execute(DropIndex(index))
    steps = [text(_events(kind, low, num_events, first_us, world)) for low in range(0, num_events, INSERTED_AT_ONCE)]
    later = [CreateIndex(index) for index in indexes]
    if is_folded:
        later += [text(statement) for statement in rebuild_all_rollups()]
    later.append(text("ANALYZE") if kind == "postgresql" else text("SELECT 1"))
    for statement in progress.track([*steps, *later], description=f"{kind}: {num_events} events"):
        with database.write() as connection:
            for setting in _FAST_SETTINGS[kind]:
                connection.exec_driver_sql(setting)
            connection.execute(statement)
    if not is_folded:
        step = _step(num_events)
        batches = [{"id": 1 + i, "at_us": first_us + i * step} for i in range(-(-num_events // PER_BATCH))]
        with database.write() as connection:
            connection.execute(insert(schema.usage_batches), batches)
    return UsageWorld(
        num_events=num_events,
        first_us=first_us,
        tenant_ids=tuple(filled.tenant_ids),
        adapter_ids=tuple(filled.adapter_ids[0]),
        made_s=round(time.perf_counter() - started, 1),
    )


def _step(num_events: int) -> int:
    return MONTH_US * PER_BATCH // num_events


def _events(kind: str, low: int, num_events: int, first_us: int, world: World) -> str:
    return _EVENTS.format(
        request_id=_REQUEST_ID[kind],
        numbers=_NUMBERS[kind].format(low=low, high=min(num_events, low + INSERTED_AT_ONCE)),
        first=first_us,
        step=_step(num_events),
        per_batch=PER_BATCH,
        tenants=world.num_tenants,
        adapters=world.adapters_each,
    )


def _name(connection: Connection, tenant_ids: Sequence[str], adapter_ids: Sequence[Sequence[str]]) -> None:
    """Insert two keys per tenant, and create helper tables that map numbers to tenants and adapters."""
    numbered = []
    keys = []
    for number, tenant_id in enumerate(tenant_ids):
        pair = [new_id("key"), new_id("key")]
        numbered.append({"number": number, "id": tenant_id, "key_0": pair[0], "key_1": pair[1]})
        for which, key_id in enumerate(pair):
            keys.append(key_row(key_id, tenant_id, f"key-{which}", f"{which}{number:015d}"))
    connection.execute(insert(schema.api_keys), keys)
    connection.execute(text("CREATE TABLE made_tenants (number BIGINT PRIMARY KEY, id TEXT, key_0 TEXT, key_1 TEXT)"))
    connection.execute(text("INSERT INTO made_tenants VALUES (:number, :id, :key_0, :key_1)"), numbered)
    connection.execute(
        text("CREATE TABLE made_adapters (number BIGINT PRIMARY KEY, adapter_id TEXT, version_id TEXT, model TEXT)")
    )
    versions = schema.adapter_versions.c
    first = select(versions.adapter_id, versions.id).where(versions.number == 1)
    version_ids = {row.adapter_id: row.id for row in connection.execute(first)}
    connection.execute(
        text("INSERT INTO made_adapters VALUES (:number, :adapter_id, :version_id, :model)"),
        [
            {
                "number": tenant * 1000 + which,
                "adapter_id": adapter_id,
                "version_id": version_ids[adapter_id],
                "model": f"tenant-{tenant}/adapter-{which}@1",
            }
            for tenant, row in enumerate(adapter_ids)
            for which, adapter_id in enumerate(row)
        ],
    )
