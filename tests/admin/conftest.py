"""The admin app over real services: SQLite, local blobs and the real validation process; only the engine is a fake."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import structlog
import typer.testing
from safetensors.numpy import save_file
from starlette.types import ASGIApp
from typer.testing import CliRunner

from loramux.adapter_store.blobs.interface import BlobStore
from loramux.adapter_store.blobs.local import LocalBlobStore
from loramux.adapter_store.formats.pack_target import PackTarget
from loramux.adapter_store.ingest.export import VersionExport
from loramux.adapter_store.ingest.ingest import Ingest
from loramux.adapter_store.ingest.jobs import IngestJobs
from loramux.adapter_store.ingest.sources import AdapterSources
from loramux.adapter_store.ingest.worker import IngestWorker
from loramux.adapter_store.registry.aliases import AdapterAliases
from loramux.adapter_store.registry.pins import AdapterPins
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.sharing import AdapterGrants
from loramux.adapter_store.registry.version_states import VersionStates
from loramux.adapter_store.validation.validator import SubprocessValidator
from loramux.admin.app import create_admin_app
from loramux.admin.cli import app
from loramux.admin.doctor.self_check import SelfCheck
from loramux.admin.rest.services import (
    MAX_CALLS,
    MAX_CALLS_EACH,
    MAX_REPORTS_EACH,
    NUM_REPORT_THREADS,
    AdminServices,
)
from loramux.admin.server.http_servers import HttpServer
from loramux.admin.server.idempotency_keys import IdempotencyKeys
from loramux.admin.server.listeners import bind, url_of
from loramux.admin.server.transfer_slots import TransferSlots
from loramux.kernels.layout import LinearShape, PageGeometry
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.audit_log import AuditLog
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.database_health import DatabaseHealth
from loramux.platform.admission.group_commit import GroupCommit
from loramux.platform.admission.records import ReservationRequest
from loramux.platform.engine_link.scripted_engine import ScriptedEngine
from loramux.platform.generation.adapter_loads import AdapterLoads
from loramux.platform.generation.cold_loads import ColdLoads
from loramux.platform.generation.requests_in_flight import RequestsInFlight
from loramux.platform.ledger.events import Ledger
from loramux.platform.ledger.price_list import PriceList
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.quotas.overview import QuotaOverview
from loramux.platform.quotas.policies import QuotaPolicies
from loramux.platform.quotas.stock import AdapterLimits
from loramux.platform.telemetry.metrics import GatewayMetrics
from tests.migrated import migrated_sqlite

# Typer makes the tree of commands anew for every call; one is enough for a test run.
typer.testing._get_command = cache(typer.testing._get_command)

ADMIN_KEY = "a-key-of-more-than-thirty-two-characters"
NUM_LAYERS = 2
TARGET = PackTarget(
    modules=(LinearShape("self_attn.q_proj", 32, 32), LinearShape("mlp.down_proj", 48, 32)),
    geometry=PageGeometry(num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=16, kv_itemsize=4, adapter_itemsize=4),
    dtype="float32",
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def log() -> Iterator[list[Any]]:
    """What the services logged; kept off standard output, which belongs to the command line."""
    with structlog.testing.capture_logs() as entries:
        yield entries


@dataclass
class AdminSide:
    """The services behind the app, and what a test may look into or break."""

    services: AdminServices
    blobs: BlobStore
    engine: ScriptedEngine


@pytest.fixture
def admin_blobs(tmp_path: Path) -> BlobStore:
    """What a module may put another store in the place of."""
    return LocalBlobStore(tmp_path / "blobs")


@pytest.fixture
def admin_target() -> PackTarget:
    return TARGET


@pytest.fixture
def admin_sources() -> AdapterSources:
    return AdapterSources()


@contextmanager
def open_admin_side(
    directory: Path, target: PackTarget, blobs: BlobStore | None = None, sources: AdapterSources | None = None
) -> Iterator[AdminSide]:
    """The services over an empty database in `directory`, where the blobs are too unless another store is given."""
    database = Database(migrated_sqlite(directory / "loramux.db"))
    registry = AdapterRegistry(database, reserved_names=("the-base",), limits=AdapterLimits())
    blobs = blobs or LocalBlobStore(directory / "blobs")
    # Not behind everything else on a machine that many tests keep busy.
    validator = SubprocessValidator(niceness=0)
    ingest = Ingest(registry, blobs, target, directory / "scratch", validator, sources=sources or AdapterSources())
    worker = IngestWorker(ingest)
    engine = ScriptedEngine()
    commit = GroupCommit(Admission(database))
    with ThreadPoolExecutor(4) as executor, ThreadPoolExecutor(2) as report_executor:
        services = AdminServices(
            database=database,
            tenants=Tenants(database),
            api_keys=ApiKeys(database, ADMIN_KEY),
            registry=registry,
            aliases=AdapterAliases(database),
            grants=AdapterGrants(database),
            version_states=VersionStates(database, registry),
            ingest=ingest,
            export=VersionExport(database, blobs, directory / "scratch"),
            jobs=IngestJobs(database),
            pins=AdapterPins(database, registry),
            idempotency_keys=IdempotencyKeys(database),
            requests=RequestsInFlight(database),
            quotas=QuotaPolicies(database),
            quota_overview=QuotaOverview(database),
            prices=PriceList(database),
            audit_log=AuditLog(database),
            ledger=Ledger(database),
            engine=engine,
            loads=AdapterLoads(engine, ColdLoads(engine), commit, DatabaseHealth()),
            metrics=GatewayMetrics(),
            self_check=SelfCheck(
                database=database, blobs=blobs, engine=engine, data_dir=directory, served_name="the-base"
            ),
            metrics_token=None,
            is_loopback=True,
            executor=executor,
            report_executor=report_executor,
            # No rest, which would end after a test's event loop has.
            call_slots=TransferSlots("calls", MAX_CALLS, MAX_CALLS_EACH),
            page_slots=TransferSlots("pages", MAX_CALLS, MAX_CALLS_EACH),
            report_slots=TransferSlots("reports", NUM_REPORT_THREADS, MAX_REPORTS_EACH),
        )
        worker.start()
        yield AdminSide(services, blobs, engine)
        validator.close()
        worker.stop()
    commit.close()
    database.close()


@pytest.fixture
def admin_side(
    tmp_path: Path, admin_target: PackTarget, admin_blobs: BlobStore, admin_sources: AdapterSources
) -> Iterator[AdminSide]:
    with open_admin_side(tmp_path, admin_target, admin_blobs, admin_sources) as side:
        yield side


@pytest.fixture
async def http(admin_side: AdminSide) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the admin app with the operator's key."""
    transport = httpx.ASGITransport(create_admin_app(admin_side.services))
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://admin", headers=headers) as client:
        yield client


@dataclass
class RunningServer:
    """The admin app on a real listener, in a thread."""

    url: str
    server: HttpServer
    thread: threading.Thread

    def stop(self, is_forced: bool = False) -> None:
        self.server.force_exit = is_forced
        self.server.stop()
        self.thread.join(10)
        assert not self.thread.is_alive()


@pytest.fixture
def admin_server(admin_side: AdminSide) -> Iterator[RunningServer]:
    listener = bind("127.0.0.1", 0, "admin_port")
    url = url_of(listener)
    server = HttpServer(create_admin_app(admin_side.services), listener)
    thread = threading.Thread(target=lambda: asyncio.run(server.run_until_stopped()))
    thread.start()
    with httpx.Client(base_url=url, trust_env=False, verify=False) as client:
        for _ in range(200):
            with suppress(httpx.TransportError):
                client.get("/health/live")
                break
            time.sleep(0.02)
    running = RunningServer(url, server, thread)
    yield running
    running.stop()


@pytest.fixture
def admin_url(admin_server: RunningServer) -> str:
    return admin_server.url


Run = Callable[..., Any]
"""Runs `loramux` with arguments; the result has exit_code, stdout and stderr."""


@pytest.fixture
def loramux(admin_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command line, which calls the running server and knows no profiles."""
    monkeypatch.setenv("LORAMUX_ADMIN_URL", admin_url)
    monkeypatch.setenv("LORAMUX_ADMIN_KEY", ADMIN_KEY)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    runner = CliRunner()
    return lambda *arguments, **options: runner.invoke(app, [str(argument) for argument in arguments], **options)


def answer(result: Any) -> dict[str, Any]:
    """The JSON that a verb printed."""
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


MakeAdapter = Callable[..., Path]


@pytest.fixture
def make_adapter(tmp_path: Path) -> MakeAdapter:
    """Writes a PEFT directory that fits TARGET; every call makes other weights."""

    def make(rank: int = 2, config: dict[str, object] | None = None, poison: float | None = None) -> Path:
        directory = tmp_path / f"peft-{secrets.token_hex(4)}"
        directory.mkdir()
        random = np.random.default_rng(secrets.randbits(32))
        tensors = {}
        for layer in range(NUM_LAYERS):
            for module in TARGET.modules:
                name = f"base_model.model.model.layers.{layer}.{module.name}"
                shapes = {"lora_A": (rank, module.in_features), "lora_B": (module.out_features, rank)}
                for part, shape in shapes.items():
                    tensors[f"{name}.{part}.weight"] = (random.standard_normal(shape) * 0.02).astype(np.float32)
        if poison is not None:
            next(iter(tensors.values()))[0, 0] = poison
        save_file(tensors, directory / "adapter_model.safetensors")
        document: dict[str, object] = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": 2 * rank,
            "target_modules": ["q_proj", "down_proj"],
            **(config or {}),
        }
        (directory / "adapter_config.json").write_text(json.dumps(document))
        return directory

    return make


def begin(admin_side: AdminSide, tenant_id: str, key_id: str, model: str, prompt: int, completion: int = 16) -> str:
    """Reserve for one request of this size, which is in flight then."""
    request_id = new_id("req")
    Admission(admin_side.services.database).reserve(
        ReservationRequest(
            request_id=request_id,
            tenant_id=tenant_id,
            api_key_id=key_id,
            model=model,
            adapter_version_id=None,
            endpoint="completions",
            prompt_tokens=prompt,
            reserved_tokens=prompt + completion,
        )
    )
    return request_id


def use(admin_side: AdminSide, tenant_id: str, key_id: str, model: str, prompt: int, completion: int) -> None:
    """Settle one request of this size."""
    request_id = begin(admin_side, tenant_id, key_id, model, prompt, completion)
    settlement = Settlement(status="completed", prompt_tokens=prompt, completion_tokens=completion)
    Admission(admin_side.services.database).settle(request_id, settlement)


CONSOLE_HOST = "http://admin.example"


@pytest.fixture(scope="module")
def console_side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminSide]:
    """Services that the module's tests share; each test makes what it needs beside what is there."""
    with open_admin_side(tmp_path_factory.mktemp("console"), TARGET) as side:
        yield side


@pytest.fixture(scope="module")
def console_app(console_side: AdminSide) -> ASGIApp:
    return create_admin_app(console_side.services)


def client_of(app: ASGIApp, base_url: str = CONSOLE_HOST) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=base_url)


@pytest.fixture
async def browser(console_app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    """A browser that nobody has signed in with."""
    async with client_of(console_app) as client:
        yield client
