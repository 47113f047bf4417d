"""Measures how long the admin API's lists take on a large company's data.

By default there are 1,000 tenants with one key each, 10,000 adapters, 100,000 versions, 1,000 requests in flight and
1,000 resident adapters, on SQLite and on PostgreSQL. Every call goes through the whole app, including authentication,
SQL, and validation of the response against the documented schema, but not over a network. Pages have 100 items.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from rich.table import Table
from sqlalchemy import insert

from benchmarks.accounts.databases import KINDS as DATABASES
from benchmarks.accounts.databases import open_database
from benchmarks.accounts.registry_world import Filled, World, digest_of, fill
from benchmarks.gpu.bench import CheckError
from benchmarks.machine import add_allow_busy, describe, require_idle
from benchmarks.tables import open_console
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
from loramux.platform.engine_link.scripted_engine import ScriptedEngine
from loramux.platform.generation.adapter_loads import AdapterLoads
from loramux.platform.generation.cold_loads import ColdLoads
from loramux.platform.generation.requests_in_flight import RequestsInFlight
from loramux.platform.telemetry.metrics import GatewayMetrics

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
        {
            "id": key_id,
            "tenant_id": tenant_id,
            "public_id": f"{number:016d}",
            "secret_sha256": bytes(32),
            "name": "default",
            "scopes": ["adapters", "base"],
            "created_us": 1,
        }
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
    return {name: _figures(samples) for name, samples in times.items()}


def _figures(samples: list[float]) -> dict[str, float]:
    p50, p95 = np.percentile(np.array(samples) * 1e3, [50, 95])
    return {"p50_ms": round(float(p50), 2), "p95_ms": round(float(p95), 2)}


def main() -> None:
    arguments = _arguments()
    require_idle(arguments.allow_busy)
    world = World(arguments.tenants, arguments.adapters_each, arguments.versions_each)
    results: dict[str, Any] = {}
    for kind in DATABASES:
        with open_database(kind) as database:
            filled = fill(database, world)
            add_keys_and_requests(database, filled)
            with open_services(database, world) as services:
                freeze_gc()
                results[kind] = asyncio.run(measure(services, filled, arguments.calls))
    shape = {"tenants": world.num_tenants, "adapters": world.num_adapters, "versions": world.num_versions}
    document = {
        "machine": describe(),
        "is_idle": not arguments.allow_busy,
        "world": shape,
        "calls": arguments.calls,
        "results": results,
    }
    _print(document)
    if arguments.out is not None:
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    worst = max(figures["p95_ms"] for result in results.values() for figures in result.values())
    if worst > TARGET_MS:
        raise SystemExit(f"a list took {worst:.1f} ms at p95; the target is {TARGET_MS:g} ms")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--adapters-each", type=int, default=10)
    parser.add_argument("--versions-each", type=int, default=10)
    parser.add_argument("--calls", type=int, default=100, help="calls per list")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    add_allow_busy(parser)
    return parser.parse_args()


def _print(document: dict[str, Any]) -> None:
    table = Table(title="{tenants} tenants, {adapters} adapters, {versions} versions".format(**document["world"]))
    table.add_column("list")
    for kind in document["results"]:
        for column in ("p50", "p95"):
            table.add_column(f"{kind} {column}, ms", justify="right")
    first = next(iter(document["results"].values()))
    for name in first:
        cells = [result[name] for result in document["results"].values()]
        table.add_row(name, *(f"{cell[key]:.1f}" for cell in cells for key in ("p50_ms", "p95_ms")))
    open_console().print(table)


if __name__ == "__main__":
    main()
