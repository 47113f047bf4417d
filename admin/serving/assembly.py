"""Assembles the server process: database, stores, services and both apps. Importing this module imports most of
loramux, but not torch.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import structlog
from fastapi import FastAPI
from sqlalchemy import inspect
from sqlalchemy.exc import SQLAlchemyError

from loramux.adapter_store.blobs.blob_url import open_blob_store
from loramux.adapter_store.blobs.interface import BlobStore
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.formats.version_files.tokenizer_files import BaseVocabulary
from loramux.adapter_store.hub.hub_client import HubClient
from loramux.adapter_store.ingest.export import VersionExport
from loramux.adapter_store.ingest.ingest import Ingest
from loramux.adapter_store.ingest.worker import IngestWorker
from loramux.adapter_store.registry.base_servers import OwnServer
from loramux.adapter_store.registry.bases import Bases
from loramux.adapter_store.registry.eval_claims import EvalClaims
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.sandbox.confinement import ESSENTIAL
from loramux.adapter_store.sources.adapter_sources import AdapterSources
from loramux.adapter_store.tiers.disk_tier import DiskTier
from loramux.adapter_store.validation.validator import PUSH_NICENESS, PUSH_WORKER, SubprocessValidator
from loramux.admin.doctor.self_check import SelfCheck
from loramux.admin.rest.services import (
    NUM_ADMIN_THREADS,
    NUM_REPORT_THREADS,
    PUSHES_AT_ONCE,
    AccountServices,
    AdapterServices,
    AdminServices,
    EngineServices,
    EventServices,
    UsageServices,
)
from loramux.admin.server.data_directory import DataDirectory
from loramux.admin.server.idempotency_keys import IdempotencyKeys
from loramux.admin.server.settings import Settings
from loramux.admin.serving.app import create_admin_app
from loramux.admin.serving.event_upkeep import EventUpkeep
from loramux.admin.serving.gateway_assembly import (
    NUM_THREADS,
    GatewayStores,
    open_batches,
    open_gateway,
    open_templates,
    refused_starts,
    revealed,
    served_model,
)
from loramux.admin.serving.upkeep import Upkeep
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.model_files import base_sha256
from loramux.engine.chat_templates.chat_template import read_special_tokens
from loramux.engine.loop.config import EngineConfig, pack_target, resolve_max_model_len
from loramux.migrations import schema
from loramux.migrations.claims import end_claims
from loramux.migrations.database import Database, DatabaseError, NoDatabase
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.audit_log import AuditLog
from loramux.platform.accounts.key_authentication import open_key_authentication
from loramux.platform.base_draw import BaseDraw
from loramux.platform.batches.batch_claims import BatchQueue
from loramux.platform.batches.room import RoomLimits
from loramux.platform.batches.runner import BatchRunner
from loramux.platform.engine_link.engine_client import EngineClient
from loramux.platform.evals.runner import EvalRunner
from loramux.platform.events.webhook_runner import MAX_DELIVERIES, WebhookRunner
from loramux.platform.events.webhook_sender import WebhookSender
from loramux.platform.generation.cold_loads import held_nowhere_else
from loramux.platform.generation.requests_in_flight import RequestsInFlight
from loramux.platform.listener.app import create_openai_app
from loramux.platform.quotas.stock import StockLimits
from loramux.platform.requests.services import GatewayServices
from loramux.platform.runtime_adapters.load_sources import LoadSources
from loramux.platform.runtime_adapters.runtime_adapters import RuntimeAdapters
from loramux.platform.telemetry.measured_validator import MeasuredValidator
from loramux.platform.telemetry.metrics import GatewayMetrics
from loramux.platform.telemetry.package_metrics import IngestMetrics, ReplicaMetrics
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tokenizer.prompt_hash import prompt_sha256
from loramux.platform.tokenizer.version_tokenizers import VersionTokenizers

if TYPE_CHECKING:
    from loramux.admin.serving.sharing import Sharing
    from loramux.platform.cluster.cluster_fleet import ClusterFleet
    from loramux.platform.replicas.data_parallel import DataParallelEngines

Shared: TypeAlias = "Sharing | ClusterFleet | DataParallelEngines"
OpenSharing: TypeAlias = "Callable[[Database, ReplicaMetrics, Executor, BaseDraw], Shared]"

NUM_LOAD_THREADS = 2
"""Number of threads that look up the sources of adapters which tenants' programs load."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stores(GatewayStores):
    """What only a server has: the blobs, the base's identity, and the ingestion of uploads."""

    blobs: BlobStore
    base_id: str
    prompts: str
    """Identifies the base's tokenizer and chat templates."""
    vocabulary: BaseVocabulary
    validators: tuple[SubprocessValidator, ...]
    ingest: Ingest


@dataclass(frozen=True, slots=True)
class Assembled:
    gateway: GatewayServices
    gateway_app: FastAPI
    admin_app: FastAPI
    upkeep: Upkeep
    events: EventUpkeep
    evals: EvalRunner
    batches: BatchRunner
    webhooks: WebhookRunner
    sharing: Shared | None
    base_id: str
    own_server: OwnServer


@contextmanager
def assemble(
    settings: Settings,
    directory: DataDirectory,
    model: ModelConfig,
    config: EngineConfig,
    engine: EngineClient,
    is_loopback: bool,
    share: OpenSharing | None = None,
) -> Iterator[Assembled]:
    """Assemble the process, except its listeners. Raises StartRefused. Entering and exiting the context both block.

    If `share` is given, the server shares requests with other servers that use its database.
    """
    with ExitStack() as stack:
        metrics = GatewayMetrics()
        with refused_starts():
            stores = open_stores(stack, settings, directory, model, config, metrics.ingest)
        database, name = stores.database, settings.resolved_served_name
        address = f"{socket.gethostname()}:{settings.port}"
        own_server = OwnServer(database, stores.base_id, name, address, stores.prompts)
        # This runs after the executors below have finished their work.
        stack.callback(_leave, own_server)
        executor = stack.enter_context(ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="services"))
        admin_executor = stack.enter_context(ThreadPoolExecutor(NUM_ADMIN_THREADS, thread_name_prefix="admin"))
        report_executor = stack.enter_context(ThreadPoolExecutor(NUM_REPORT_THREADS, thread_name_prefix="reports"))
        draw = BaseDraw(stores.base_id, stores.prompts)
        sharing = None if share is None else share(database, metrics.replicas, executor, draw)
        worker = IngestWorker(stores.ingest, note_progress=metrics.ingest.note_base_versions)
        worker.start()
        stack.callback(worker.stop)
        # This runs before `worker.stop`, which would otherwise wait for a running validation to finish.
        for validator in stores.validators:
            stack.callback(validator.close)
        gateway = open_gateway(
            stack,
            settings,
            directory,
            served_model(settings, model, resolve_max_model_len(config, model)),
            stores,
            engine if sharing is None else sharing.engine,
            executor,
            metrics,
            held_nowhere_else if sharing is None else sharing.engine.holds_elsewhere,
            draw,
        )
        kept = open_batches(settings, directory, database, stores.blobs)
        runtime_adapters = None
        if settings.load_sources:
            loaders = stack.enter_context(ThreadPoolExecutor(NUM_LOAD_THREADS, thread_name_prefix="loads"))
            runtime_adapters = RuntimeAdapters(
                gateway,
                stores.registry,
                stores.ingest,
                LoadSources(settings.load_sources),
                loaders,
                config.max_resident_adapters,
            )
        gateway_app = create_openai_app(gateway, kept, runtime_adapters)
        admin = open_admin(
            settings=settings,
            directory=directory,
            config=config,
            stores=stores,
            gateway=gateway,
            gateway_app=gateway_app,
            sharing=sharing,
            executor=admin_executor,
            report_executor=report_executor,
            resolver=stack.enter_context(ThreadPoolExecutor(MAX_DELIVERIES, thread_name_prefix="webhooks")),
            is_loopback=is_loopback,
        )
        admin_app = create_admin_app(admin, settings.admin_root_path)
        events = EventUpkeep(admin, own_server.id, settings.event_days, settings.budget_event_percent)
        upkeep = Upkeep(admin)
        evals = EvalRunner(gateway, EvalClaims(database), metrics.evals)
        room = RoomLimits(capacity=(lambda: config.max_sequences) if sharing is None else sharing.capacity)
        batches = BatchRunner(gateway, kept.files, BatchQueue(database), metrics.batches, room)
        webhooks = WebhookRunner(database, admin.call, admin.events.feed, admin.events.sender, metrics.events)
        base_id = stores.base_id
        yield Assembled(
            gateway, gateway_app, admin_app, upkeep, events, evals, batches, webhooks, sharing, base_id, own_server
        )


def open_stores(
    stack: ExitStack,
    settings: Settings,
    directory: DataDirectory,
    model: ModelConfig,
    config: EngineConfig,
    metrics: IngestMetrics,
) -> Stores:
    """Open the database, upgrading an embedded or empty one, and the blob store. Read the base's files, and finish the
    ingestion that an earlier process has left.

    `stack` closes the stores. Raises ConfigNotUsable, DatabaseError, StoreError, ModelNotSupported or SQLAlchemyError.
    """
    served_name = settings.resolved_served_name
    database = Database(settings.resolved_database_url)
    stack.callback(database.close)
    _bring_up_to_date(database, settings.is_database_embedded)
    if settings.is_database_embedded:
        # The data directory is locked, so work that a killed process has claimed can continue at once.
        end_claims(database, (schema.batches, schema.evals))
    blobs = open_blob_store(config.blob_url)
    # A wrong address or key must stop the start, not fail the first upload.
    blobs.check()
    metrics.store_breaker_open.set_function(lambda: blobs.breaker_state != "closed")
    tokenizer = ModelTokenizer.load(settings.model_dir)
    base_id, prompts = base_sha256(settings.model_dir), prompt_sha256(settings.model_dir, model.vocab_size)
    Bases(database).register(base_id, served_name, prompts)
    registry = AdapterRegistry(database, (served_name,), StockLimits(), base_id)
    special_tokens = read_special_tokens(settings.model_dir)
    vocabulary = tokenizer.base_vocabulary(model.vocab_size, special_tokens)
    templates = open_templates(settings, tokenizer)
    stack.callback(templates.close)
    required = ESSENTIAL if settings.sandbox == "required" else ()
    quantized_dir = None if config.quantized_dir is None else Path(config.quantized_dir)
    base = BaseWeights(settings.model_dir, quantized_dir)
    validator = SubprocessValidator(required=required, base=base)
    push_validator = SubprocessValidator(
        required=required, base=base, command=PUSH_WORKER, num_processes=PUSHES_AT_ONCE + 1, niceness=PUSH_NICENESS
    )
    target = pack_target(model, config.dtype, config.adapter_dtype, config.kv_dtype)
    hub = HubClient(settings.hf_endpoint, revealed(settings.hf_token))
    ingest = Ingest(
        registry,
        blobs,
        target,
        directory.scratch,
        MeasuredValidator(validator, metrics),
        sources=AdapterSources((*settings.adapter_sources, *LoadSources(settings.load_sources).allowed), hub=hub),
        is_presigning=settings.presigned_uploads,
        check_template=templates.check_upload,
        check_vocabulary=VersionTokenizers(tokenizer).check_upload,
        base_vocabulary=vocabulary,
        push_validator=MeasuredValidator(push_validator, metrics),
        warm_push=push_validator.warm,
        # The engines of a cluster are on other machines.
        open_tier=None
        if settings.cluster
        else lambda: DiskTier(Path(config.cache_dir), config.disk_tier_bytes, target.pack_key),
    )
    ingest.recover()
    tokens = open_key_authentication(settings.key_authentication)
    return Stores(
        database=database,
        api_keys=ApiKeys(database, revealed(settings.admin_key), tokens),
        registry=registry,
        tokenizer=tokenizer,
        templates=templates,
        blobs=blobs,
        base_id=base_id,
        prompts=prompts,
        vocabulary=vocabulary,
        validators=(validator, push_validator),
        ingest=ingest,
    )


def open_admin(
    *,
    settings: Settings,
    directory: DataDirectory,
    config: EngineConfig,
    stores: Stores,
    gateway: GatewayServices,
    gateway_app: FastAPI,
    sharing: Shared | None,
    executor: Executor,
    report_executor: Executor,
    resolver: Executor,
    is_loopback: bool,
) -> AdminServices:
    """Open the services behind the admin routes. `executor` and `report_executor` run their blocking calls, and
    `resolver` looks up the hosts of webhooks.
    """
    database = stores.database
    export = VersionExport(database, stores.blobs, directory.scratch)
    # Both listeners use the same tenants and keys, so that a change also clears the caches that requests use.
    return AdminServices(
        database=database,
        accounts=AccountServices(
            tenants=gateway.callers.tenants, api_keys=stores.api_keys, audit_log=AuditLog(database)
        ),
        adapters=AdapterServices.over(database, stores.registry, stores.ingest, export, stores.vocabulary),
        usage=UsageServices.over(database),
        engine=EngineServices(
            load_elsewhere=None if sharing is None else sharing.engine.load_elsewhere,
            client=gateway.engine,
            loads=gateway.run.loads,
            requests=RequestsInFlight(database),
            self_check=SelfCheck(
                database=database,
                blobs=stores.blobs,
                engine=gateway.engine,
                engines={} if sharing is None else sharing.engines,
                data_dir=directory.root,
                served_name=settings.resolved_served_name,
                model_source=settings.model_source,
                is_sandbox_required=settings.sandbox == "required",
                trouble=gateway.trouble,
            ),
            fleet=sharing,
            disk_tier=Path(config.cache_dir),
            live=gateway.run.requests,
        ),
        events=EventServices.over(database, executor, WebhookSender(resolver, settings.webhook_private_targets)),
        idempotency_keys=IdempotencyKeys(database),
        metrics=gateway.metrics,
        metrics_token=revealed(settings.metrics_token),
        is_loopback=is_loopback and not settings.trusted_proxies,
        executor=executor,
        report_executor=report_executor,
        oidc=settings.oidc,
        gateway=gateway_app,
        api_url=_api_url(settings),
        trouble=gateway.trouble,
    )


def _leave(own_server: OwnServer) -> None:
    try:
        own_server.leave()
    except SQLAlchemyError as error:
        # Another server deletes the row later.
        log.warning("could not delete this server's row", error=str(error))


def _bring_up_to_date(database: Database, is_embedded: bool) -> None:
    """Upgrade an embedded, empty or missing database. Any other database must already have the current schema."""
    try:
        database.check_schema()
    except DatabaseError as error:
        if not is_embedded and not isinstance(error, NoDatabase) and not _is_empty(database):
            raise
        database.upgrade()


def _is_empty(database: Database) -> bool:
    try:
        with database.read() as connection:
            return not inspect(connection).get_table_names()
    except SQLAlchemyError:
        return False


def _api_url(settings: Settings) -> str:
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host  # noqa: S104 - compared, not bound
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.port}/v1"
