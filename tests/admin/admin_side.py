from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loramux.adapter_store.blobs.interface import BlobStore
from loramux.adapter_store.blobs.local import LocalBlobStore
from loramux.adapter_store.formats.packed.pack_target import PackTarget
from loramux.adapter_store.ingest.export import VersionExport
from loramux.adapter_store.ingest.ingest import Ingest
from loramux.adapter_store.ingest.worker import IngestWorker
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.sources.adapter_sources import AdapterSources
from loramux.adapter_store.validation.validator import SubprocessValidator
from loramux.admin.doctor.self_check import SelfCheck
from loramux.admin.rest.services import (
    MAX_CALLS,
    MAX_CALLS_EACH,
    MAX_REPORTS_EACH,
    NUM_REPORT_THREADS,
    AccountServices,
    AdapterServices,
    AdminServices,
    AdminSlots,
    EngineServices,
    EventServices,
    UsageServices,
)
from loramux.admin.server.idempotency_keys import IdempotencyKeys
from loramux.admin.server.transfer_slots import TransferSlots
from loramux.kernels.layout import LinearShape, NormShape, PageGeometry
from loramux.migrations.database import Database
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
from loramux.platform.quotas.stock import StockLimits
from loramux.platform.telemetry.metrics import GatewayMetrics
from tests.adapter_store.base_tokenizer import base_vocabulary
from tests.migrated import migrated_sqlite
from tests.platform.scripted_engine import ScriptedEngine
from tests.shared_forks import shared_forks

MODEL_SOURCE = "hf://acme/the-base@" + 40 * "a"
ADMIN_KEY = "a-key-of-more-than-thirty-two-characters"
NUM_LAYERS = 2
TARGET = PackTarget(
    modules=(LinearShape("self_attn.q_proj", 32, 32), LinearShape("mlp.down_proj", 48, 32)),
    geometry=PageGeometry(num_layers=NUM_LAYERS, num_kv_heads=2, head_dim=16, kv_itemsize=4, adapter_itemsize=4),
    dtype="float32",
    outer_modules=(
        LinearShape("model.embed_tokens", 64, 32, is_embedding=True),
        LinearShape("lm_head", 32, 64),
    ),
    norms=(NormShape("input_layernorm", 32),),
)


@dataclass
class AdminSide:
    services: AdminServices
    blobs: BlobStore
    engine: ScriptedEngine


@contextmanager
def open_admin_side(
    directory: Path, target: PackTarget, blobs: BlobStore | None = None, sources: AdapterSources | None = None
) -> Iterator[AdminSide]:
    """Open the services over an empty database in `directory`. Blobs are stored there too, unless `blobs` is given."""
    database = Database(migrated_sqlite(directory / "loramux.db"))
    registry = AdapterRegistry(database, reserved_names=("the-base",), limits=StockLimits())
    blobs = blobs or LocalBlobStore(directory / "blobs")
    # Validate at normal priority, so that other tests on a busy machine do not starve the validator.
    with shared_forks():
        validator = SubprocessValidator(niceness=0)
    vocabulary = base_vocabulary(target.vocab_size or 70)
    ingest = Ingest(
        registry,
        blobs,
        target,
        directory / "scratch",
        validator,
        sources=sources or AdapterSources(),
        base_vocabulary=vocabulary,
    )
    worker = IngestWorker(ingest)
    engine = ScriptedEngine()
    commit = GroupCommit(Admission(database))
    with ThreadPoolExecutor(4) as executor, ThreadPoolExecutor(2) as report_executor:
        services = AdminServices(
            database=database,
            accounts=AccountServices(
                tenants=Tenants(database), api_keys=ApiKeys(database, ADMIN_KEY), audit_log=AuditLog(database)
            ),
            adapters=AdapterServices.over(
                database, registry, ingest, VersionExport(database, blobs, directory / "scratch"), vocabulary
            ),
            usage=UsageServices.over(database),
            engine=EngineServices(
                client=engine,
                loads=AdapterLoads(engine, ColdLoads(engine), commit, DatabaseHealth()),
                requests=RequestsInFlight(database),
                self_check=SelfCheck(
                    database=database,
                    blobs=blobs,
                    engine=engine,
                    data_dir=directory,
                    served_name="the-base",
                    model_source=MODEL_SOURCE,
                ),
            ),
            # Webhooks may call this machine, so that tests can receive them.
            events=EventServices.over(database, executor, WebhookSender(executor, allows_private=True)),
            idempotency_keys=IdempotencyKeys(database),
            metrics=GatewayMetrics(),
            metrics_token=None,
            is_loopback=True,
            executor=executor,
            report_executor=report_executor,
            # Leave no rest period between calls, because it would outlast a test's event loop.
            slots=AdminSlots(
                calls=TransferSlots("calls", MAX_CALLS, MAX_CALLS_EACH),
                pages=TransferSlots("pages", MAX_CALLS, MAX_CALLS_EACH),
                reports=TransferSlots("reports", NUM_REPORT_THREADS, MAX_REPORTS_EACH),
            ),
        )
        worker.start()
        yield AdminSide(services, blobs, engine)
        validator.close()
        worker.stop()
    commit.close()
    database.close()
