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
from pydantic import SecretStr
from sqlalchemy import inspect
from sqlalchemy.exc import SQLAlchemyError

from loramux.adapter_store.blobs.blob_url import open_blob_store
from loramux.adapter_store.errors import AdapterRejected, StoreError
from loramux.adapter_store.formats.files.file_names import GENERATION_FILE
from loramux.adapter_store.formats.quantization.base_weights import BaseWeights
from loramux.adapter_store.formats.version_files.answer_parsers import AnswerParsers
from loramux.adapter_store.formats.version_files.generation_config import NO_DEFAULTS, parse_generation_config
from loramux.adapter_store.ingest.export import VersionExport
from loramux.adapter_store.ingest.hub_client import HubClient
from loramux.adapter_store.ingest.ingest import Ingest
from loramux.adapter_store.ingest.jobs import IngestJobs
from loramux.adapter_store.ingest.sources import AdapterSources
from loramux.adapter_store.ingest.worker import IngestWorker
from loramux.adapter_store.registry.aliases import AdapterAliases
from loramux.adapter_store.registry.base_servers import OwnServer
from loramux.adapter_store.registry.bases import Bases
from loramux.adapter_store.registry.pins import AdapterPins
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.sharing import AdapterGrants
from loramux.adapter_store.registry.version_states import VersionStates
from loramux.adapter_store.sandbox.confinement import ESSENTIAL
from loramux.adapter_store.validation.validator import SubprocessValidator
from loramux.admin.doctor.self_check import SelfCheck
from loramux.admin.errors import StartRefused
from loramux.admin.rest.services import NUM_ADMIN_THREADS, NUM_REPORT_THREADS, AdminServices
from loramux.admin.server.data_directory import DataDirectory
from loramux.admin.server.idempotency_keys import IdempotencyKeys
from loramux.admin.server.settings import Settings
from loramux.admin.serving.app import create_admin_app
from loramux.admin.serving.upkeep import Upkeep
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.architectures.model_files import base_sha256
from loramux.engine.loop.config import EngineConfig, pack_target, resolve_max_model_len
from loramux.engine.protocol.errors import ConfigNotUsable
from loramux.migrations.database import Database, DatabaseError
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.audit_log import AuditLog
from loramux.platform.accounts.key_authentication import open_key_authentication
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.base_draw import BaseDraw
from loramux.platform.engine_link.engine_client import EngineClient
from loramux.platform.generation.cold_loads import held_nowhere_else
from loramux.platform.generation.maintenance import Maintenance
from loramux.platform.generation.requests_in_flight import RequestsInFlight
from loramux.platform.generation.running_requests import RunningRequests
from loramux.platform.generation.settlement_spool import SettlementSpool
from loramux.platform.grammars.checker import GrammarChecker
from loramux.platform.ledger.erasure import UsageErasure
from loramux.platform.ledger.events import Ledger
from loramux.platform.ledger.price_list import PriceList
from loramux.platform.openai_api.app import create_openai_app
from loramux.platform.openai_api.services import GatewayServices, GatewaySettings, ModelInfo
from loramux.platform.quotas.overview import QuotaOverview
from loramux.platform.quotas.policies import QuotaPolicies
from loramux.platform.quotas.stock import AdapterLimits
from loramux.platform.telemetry.measured_validator import MeasuredValidator
from loramux.platform.telemetry.metrics import GatewayMetrics
from loramux.platform.telemetry.tracing import Tracing
from loramux.platform.tokenizer.chat_template import ModelFilesError, read_special_tokens
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tokenizer.prompt_hash import prompt_sha256
from loramux.platform.tokenizer.tenant_templates import TenantTemplates
from loramux.platform.tokenizer.version_tokenizers import VersionTokenizers

if TYPE_CHECKING:
    from loramux.admin.serving.sharing import Sharing

Share: TypeAlias = "Callable[[Database, GatewayMetrics, Executor, BaseDraw], Sharing]"

NUM_THREADS = 16
"""Number of threads that run the SQL of inference requests. They mostly wait for the database."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Assembled:
    gateway_app: FastAPI
    admin_app: FastAPI
    running: RunningRequests
    maintenance: Maintenance
    upkeep: Upkeep
    tenants: Tenants
    api_keys: ApiKeys
    metrics: GatewayMetrics
    sharing: Sharing | None
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
    share: Share | None = None,
) -> Iterator[Assembled]:
    """Assemble the process, except its listeners. Raises StartRefused. Entering and exiting the context both block.

    If `share` is given, the server shares requests with other servers that use its database.
    """
    served_name = settings.resolved_served_name
    target = pack_target(model, config.dtype)
    with ExitStack() as stack:
        try:
            database = Database(settings.resolved_database_url)
            stack.callback(database.close)
            _bring_up_to_date(database, settings.is_database_embedded)
            blobs = open_blob_store(config.blob_url)
            blobs.check()
            tokenizer = ModelTokenizer.load(settings.model)
            base_id = base_sha256(settings.model)
            bases = Bases(database)
            prompts = prompt_sha256(settings.model, model.vocab_size)
            bases.register(base_id, served_name, prompts)
            registry = AdapterRegistry(database, (served_name,), AdapterLimits(), base_id)
            required = ESSENTIAL if settings.sandbox == "required" else ()
            quantized_dir = None if config.quantized_dir is None else Path(config.quantized_dir)
            validator = SubprocessValidator(required=required, base=BaseWeights(settings.model, quantized_dir))
            metrics = GatewayMetrics()
            metrics.store_breaker_open.set_function(lambda: blobs.breaker_state != "closed")
            special_tokens = read_special_tokens(settings.model)
            vocabulary = tokenizer.base_vocabulary(model.vocab_size, special_tokens)
            templates = TenantTemplates(special_tokens, tokenizer.chat_template)
            stack.callback(templates.close)
            hub = HubClient(settings.hf_endpoint, _revealed(settings.hf_token))
            ingest = Ingest(
                registry,
                blobs,
                target,
                directory.scratch,
                MeasuredValidator(validator, metrics),
                sources=AdapterSources(settings.adapter_sources, hub=hub),
                is_presigning=settings.presigned_uploads,
                check_template=templates.check_upload,
                check_vocabulary=VersionTokenizers(tokenizer).check_upload,
                base_vocabulary=vocabulary,
            )
            ingest.recover()
            tokens = open_key_authentication(settings.key_authentication)
        except (ConfigNotUsable, DatabaseError, StoreError, ModelFilesError) as error:
            raise StartRefused(str(error)) from error
        except SQLAlchemyError as error:
            reason = str(getattr(error, "orig", None) or error).splitlines()[0]
            raise StartRefused(f"the database cannot be used: {reason}") from error
        own_server = OwnServer(database, base_id, served_name, f"{socket.gethostname()}:{settings.port}", prompts)
        # This runs after the executors below have finished their work.
        stack.callback(_leave, own_server)
        executor = stack.enter_context(ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="services"))
        admin_executor = stack.enter_context(ThreadPoolExecutor(NUM_ADMIN_THREADS, thread_name_prefix="admin"))
        report_executor = stack.enter_context(ThreadPoolExecutor(NUM_REPORT_THREADS, thread_name_prefix="reports"))
        draw = BaseDraw(base_id, prompts)
        sharing = None if share is None else share(database, metrics, executor, draw)
        if sharing is not None:
            engine = sharing.engine
        worker = IngestWorker(ingest, note_progress=metrics.note_base_versions)
        worker.start()
        stack.callback(worker.stop)
        # This runs before `worker.stop`, which would otherwise wait for a running validation to finish.
        stack.callback(validator.close)
        tenants = Tenants(database)
        api_keys = ApiKeys(database, _revealed(settings.admin_key), tokens)
        gateway = GatewayServices.compose(
            database=database,
            tenants=tenants,
            api_keys=api_keys,
            registry=registry,
            engine=engine,
            tokenizer=tokenizer,
            templates=templates,
            grammars=GrammarChecker(settings.model, model.vocab_size, model.eos_token_ids, metrics.note_grammar),
            model=ModelInfo(
                served_name=served_name,
                max_model_len=resolve_max_model_len(config, model),
                vocab_size=model.vocab_size,
                created_s=int((settings.model / "config.json").stat().st_mtime),
                eos_token_ids=model.eos_token_ids,
            ),
            executor=executor,
            metrics=metrics,
            spool=SettlementSpool(directory.spool, int(settings.spool_bytes)),
            settings=gateway_settings(settings),
            tracing=open_tracing(settings),
            is_held_elsewhere=held_nowhere_else if sharing is None else sharing.engine.holds_elsewhere,
            draw=draw,
        )
        stack.callback(gateway.close)
        gateway.grammars.preload()
        gateway_app = create_openai_app(gateway)
        admin = AdminServices(
            database=database,
            tenants=tenants,
            api_keys=api_keys,
            registry=registry,
            bases=bases,
            aliases=AdapterAliases(database),
            grants=AdapterGrants(database),
            version_states=VersionStates(database, registry),
            ingest=ingest,
            export=VersionExport(database, blobs, directory.scratch),
            jobs=IngestJobs(database),
            pins=AdapterPins(database, registry),
            idempotency_keys=IdempotencyKeys(database),
            requests=RequestsInFlight(database),
            live=gateway.running,
            quotas=QuotaPolicies(database),
            quota_overview=QuotaOverview(database),
            prices=PriceList(database),
            audit_log=AuditLog(database),
            ledger=Ledger(database),
            erasure=UsageErasure(database),
            engine=engine,
            fleet=sharing,
            loads=gateway.loads,
            metrics=metrics,
            self_check=SelfCheck(
                database=database,
                blobs=blobs,
                engine=engine,
                data_dir=directory.root,
                served_name=served_name,
                is_sandbox_required=settings.sandbox == "required",
            ),
            vocabulary=vocabulary,
            metrics_token=_revealed(settings.metrics_token),
            is_loopback=is_loopback and not settings.trusted_proxies,
            executor=admin_executor,
            report_executor=report_executor,
            oidc=settings.oidc,
            trouble=gateway.trouble,
            disk_tier=Path(config.cache_dir),
            gateway=gateway_app,
            api_url=_api_url(settings),
        )
        yield Assembled(
            gateway_app,
            create_admin_app(admin, settings.admin_root_path),
            gateway.running,
            gateway.maintenance,
            Upkeep(admin),
            tenants,
            api_keys,
            metrics,
            sharing,
            base_id,
            own_server,
        )


def _leave(own_server: OwnServer) -> None:
    try:
        own_server.leave()
    except SQLAlchemyError as error:
        # Another server deletes the row later.
        log.warning("could not delete this server's row", error=str(error))


def gateway_settings(settings: Settings) -> GatewaySettings:
    """Return the gateway's settings, with the model's sampling defaults.

    Raises StartRefused if the defaults cannot be used.
    """
    path = settings.model / GENERATION_FILE
    base_defaults = NO_DEFAULTS
    if settings.generation_config == "auto" and path.is_file():
        try:
            base_defaults = parse_generation_config(path.read_bytes()).defaults
        except AdapterRejected as error:
            raise StartRefused(f"{path} cannot be used: {error}; correct it, or set generation_config to off") from None
    return GatewaySettings(
        logs_answers=settings.log_answers,
        base_defaults=base_defaults,
        applies_adapter_defaults=settings.adapter_generation_config == "auto",
        base_parsers=AnswerParsers(settings.tool_call_parser, settings.reasoning_parser),
        cors_origins=settings.cors_origins,
    )


def open_tracing(settings: Settings) -> Tracing | None:
    config = settings.trace_config
    if config is None:
        return None
    try:
        # Importing OpenTelemetry takes half a second, so it is imported only if tracing is on.
        from loramux.platform.telemetry.otel_tracing import OtelTracing

        return OtelTracing.open(config, settings.traces_share, settings.traces_of_clients)
    except ImportError:
        raise StartRefused(
            "traces require OpenTelemetry: install loramux with the 'traces' extra, or set traces to off"
        ) from None
    except ConfigNotUsable as error:
        raise StartRefused(str(error)) from error


def _bring_up_to_date(database: Database, is_embedded: bool) -> None:
    """Upgrade an embedded or empty database. Any other database must already have the current schema."""
    try:
        database.check_schema()
    except DatabaseError:
        if not is_embedded and not _is_empty(database):
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


def _revealed(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()
