"""Measures how long the admin API's lists take on a large company's data.

By default there are 1,000 tenants with one key each, 10,000 adapters, 100,000 versions, 1,000 requests in flight and
1,000 resident adapters, on SQLite and on PostgreSQL. Every call goes through the whole app, including authentication,
SQL, and validation of the response against the documented schema, but not over a network. Pages have 100 items.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import insert

from benchmarks.accounts.databases import KINDS, open_database_at
from benchmarks.accounts.registry_world import Filled, World, add_world, digest_of, fill, key_row, world_of
from benchmarks.answers import CheckError
from benchmarks.harness import begin, new_parser, percentiles_ms, reports_failure, require_below
from benchmarks.tables import table_by_database
from loramux.adapter_store.blobs.local import LocalBlobStore
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.formats.version_files.tokenizer_files import BaseVocabulary
from loramux.adapter_store.ingest.export import VersionExport
from loramux.adapter_store.ingest.ingest import Ingest
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.validation.validator import SubprocessValidator
from loramux.admin.doctor.self_check import SelfCheck
from loramux.admin.rest.services import (
    NUM_ADMIN_THREADS,
    AccountServices,
    AdapterServices,
    AdminServices,
    EngineServices,
    EventServices,
    UsageServices,
)
from loramux.admin.server.idempotency_keys import IdempotencyKeys
from loramux.admin.serving.app import create_admin_app
from loramux.engine.server.gc_freeze import freeze_gc
from loramux.kernels.layout import LinearShape, PageGeometry
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import api_keys, reservations
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.audit_log import AuditLog
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.database_health import DatabaseHealth
from loramux.platform.admission.group_commit import GroupCommit
from loramux.platform.events.webhook_sender import WebhookSender
from loramux.platform.generation.adapter_loads import AdapterLoads
from loramux.platform.generation.cold_loads import ColdLoads
from loramux.platform.generation.requests_in_flight import RequestsInFlight
from loramux.platform.telemetry.metrics import GatewayMetrics
from tests.platform.scripted_engine import ScriptedEngine

TARGET_MS = 200.0
ADMIN_KEY = "the key of the benchmark's administrator"
NUM_RUNNING = 1000
NUM_RESIDENT = 1000
TARGET = PackTarget(
    modules=(LinearShape("self_attn.q_proj", 32, 32),),
    geometry=PageGeometry(num_layers=2, num_kv_heads=2, head_dim=16, kv_itemsize=4, adapter_itemsize=4),
    dtype="float32",
)
VOCABULARY = BaseVocabulary(num_tokens=0, vocab_size=0, added_tokens={}, special_tokens={}, sha256="")
"""No list reads the base's vocabulary."""


@contextmanager
def open_services(database: Database, world: World) -> Iterator[AdminServices]:
    registry = AdapterRegistry(database)
    engine = ScriptedEngine()
    for number in range(min(NUM_RESIDENT, world.num_adapters)):
        tenant, adapter = number % world.num_tenants, number // world.num_tenants
        engine.resident[digest_of(tenant, adapter, 1)] = 1
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(NUM_ADMIN_THREADS) as executor:
        root = Path(directory)
        blobs = LocalBlobStore(root / "blobs")
        commit = GroupCommit(Admission(database))
        yield AdminServices(
            database=database,
            accounts=AccountServices(
                tenants=Tenants(database), api_keys=ApiKeys(database, ADMIN_KEY), audit_log=AuditLog(database)
            ),
            adapters=AdapterServices.over(
                database,
                registry,
                Ingest(registry, blobs, TARGET, root / "scratch", SubprocessValidator()),
                VersionExport(database, blobs, root / "scratch"),
                VOCABULARY,
            ),
            usage=UsageServices.over(database),
            engine=EngineServices(
                client=engine,
                loads=AdapterLoads(engine, ColdLoads(engine), commit, DatabaseHealth()),
                requests=RequestsInFlight(database),
                self_check=SelfCheck(database=database, blobs=blobs, engine=engine, data_dir=root, served_name="base"),
            ),
            events=EventServices.over(database, executor, WebhookSender(executor, allows_private=False)),
            idempotency_keys=IdempotencyKeys(database),
            metrics=GatewayMetrics(),
            metrics_token=None,
            is_loopback=True,
            executor=executor,
            report_executor=executor,
        )
        commit.close()


def add_keys_and_requests(database: Database, filled: Filled) -> None:
    """Insert one key per tenant and NUM_RUNNING in-flight requests, spread over the tenants."""
    key_ids = {tenant_id: new_id("key") for tenant_id in filled.tenant_ids}
    keys = [
        key_row(key_id, tenant_id, "default", f"{number:016d}")
        for number, (tenant_id, key_id) in enumerate(key_ids.items())
    ]
    running = [
        {
            "id": new_id("req"),
            "tenant_id": filled.tenant_ids[number % len(filled.tenant_ids)],
            "api_key_id": key_ids[filled.tenant_ids[number % len(filled.tenant_ids)]],
            "model": "base",
            "endpoint": "chat",
            "state": "open",
            "prompt_tokens": 10,
            "reserved_tokens": 100,
            "charges": [],
            "checkpoint_tokens": 5,
            "created_us": database.now_us(),
            "lease_expires_us": database.now_us() + 10**9,
            "cost_nanos": 0,
        }
        for number in range(NUM_RUNNING)
    ]
    known = set(reservations.c.keys())
    with database.write() as connection:
        connection.execute(insert(api_keys), keys)
        connection.execute(insert(reservations), [{k: v for k, v in row.items() if k in known} for row in running])


def paths(filled: Filled, choose: random.Random) -> dict[str, str]:
    """The path of one call of each kind, for a random tenant and a random position in the list."""
    tenant = choose.randrange(len(filled.tenant_ids))
    tenant_id, adapter_id = filled.tenant_ids[tenant], choose.choice(filled.adapter_ids[tenant])
    far = sorted(adapter_id for row in filled.adapter_ids for adapter_id in row)[choose.randrange(100, 1000)]
    return {
        "tenants": "/tenants?limit=100",
        "tenants, far": f"/tenants?limit=100&after={choose.choice(filled.tenant_ids)}",
        "a tenant's keys": f"/api_keys?limit=100&tenant={tenant_id}",
        "adapters": "/adapters?limit=100",
        "adapters, far": f"/adapters?limit=100&after={far}",
        "a tenant's adapters": f"/adapters?limit=100&tenant={tenant_id}",
        "versions": f"/adapters/{adapter_id}/versions?limit=100",
        "jobs under way": "/jobs?limit=100",
        "jobs that succeeded": "/jobs?limit=100&state=succeeded",
        "a tenant's jobs": f"/jobs?limit=100&state=succeeded&tenant={tenant_id}",
        "requests in flight": "/requests?limit=100",
        "a tenant's requests": f"/requests?limit=100&tenant={tenant_id}",
        "pool": "/residency",
        "a tenant's in the pool": f"/residency?tenant={tenant_id}",
        "disk tier": "/residency?tier=disk",
    }


async def measure(services: AdminServices, filled: Filled, calls: int) -> dict[str, Any]:
    choose = random.Random(0)
    times: dict[str, list[float]] = {}
    transport = httpx.ASGITransport(create_admin_app(services))
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://admin/admin/v1", headers=headers) as client:
        for turn in range(calls + 2):
            for name, path in paths(filled, choose).items():
                started = time.perf_counter()
                response = await client.get(path)
                took = time.perf_counter() - started
                body = response.json()
                if response.status_code != 200 or (not body["data"] and name != "jobs under way"):
                    raise CheckError(f"{name}: {response.status_code} with {len(body.get('data', []))} items")
                if turn > 1:
                    times.setdefault(name, []).append(took)
    return {name: percentiles_ms(samples, 50, 95) for name, samples in times.items()}


@reports_failure
def main(argv: Sequence[str] | None = None) -> None:
    parser = new_parser("accounts.admin_lists", __doc__)
    add_world(parser)
    parser.add_argument("--calls", type=int, default=100, help="calls per list")
    run = begin(parser.parse_args(argv))
    world = world_of(run.arguments)
    results: dict[str, Any] = {}
    for kind in KINDS:
        with open_database_at(kind) as (database, _):
            filled = fill(database, world)
            add_keys_and_requests(database, filled)
            with open_services(database, world) as services:
                freeze_gc()
                results[kind] = asyncio.run(measure(services, filled, run.arguments.calls))
    run.console.print(table_by_database(str(world), "list", results))
    run.write({"world": world.document, "calls": run.arguments.calls, "results": results})
    slowest = {kind: max(figures["p95_ms"] for figures in found.values()) for kind, found in results.items()}
    require_below(TARGET_MS, {f"the slowest list on {kind} at p95": value for kind, value in slowest.items()})


if __name__ == "__main__":
    raise SystemExit(main())
