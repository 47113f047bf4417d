"""Assembles a gateway: the services of every gateway, and the process of `loramux gateway`, without administration."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import FastAPI
from pydantic import SecretStr
from sqlalchemy.exc import SQLAlchemyError

from loramux.adapter_store.blobs.blob_url import open_blob_store
from loramux.adapter_store.blobs.interface import BlobStore
from loramux.adapter_store.errors import AdapterRejected, StoreError
from loramux.adapter_store.formats.files.file_names import GENERATION_FILE
from loramux.adapter_store.formats.version_files.answer_parsers import AnswerParsers
from loramux.adapter_store.formats.version_files.generation_config import NO_DEFAULTS, parse_generation_config
from loramux.adapter_store.formats.version_files.pooling_files import base_pooling
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.admin.errors import StartRefused
from loramux.admin.server.data_directory import DataDirectory
from loramux.admin.server.metrics_route import metrics_router
from loramux.admin.server.settings import Settings
from loramux.engine.architectures.model_config import ModelConfig
from loramux.engine.chat_templates.chat_template import read_special_tokens
from loramux.engine.protocol.errors import ConfigNotUsable, ModelNotSupported
from loramux.migrations.database import Database, DatabaseError
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.key_authentication import open_key_authentication
from loramux.platform.base_draw import BaseDraw
from loramux.platform.batches.batch_claims import BatchQueue
from loramux.platform.batches.room import RoomLimits
from loramux.platform.batches.runner import BatchRunner
from loramux.platform.batches.services import BatchServices
from loramux.platform.batches.tenant_files import TenantFiles
from loramux.platform.engine_link.engine_client import EngineClient
from loramux.platform.generation.cold_loads import HeldElsewhere, held_nowhere_else
from loramux.platform.generation.settlement_spool import SettlementSpool
from loramux.platform.grammars.checker import GrammarChecker
from loramux.platform.listener.app import create_openai_app
from loramux.platform.listener.health import add_health
from loramux.platform.requests.error_responses import install_error_handling
from loramux.platform.requests.services import GatewayServices, GatewaySettings, ModelInfo
from loramux.platform.service_tiers import parse_objectives
from loramux.platform.telemetry.metrics import GatewayMetrics
from loramux.platform.telemetry.tracing import Tracing
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tokenizer.tenant_templates import TenantTemplates

if TYPE_CHECKING:
    from loramux.platform.replicas.data_parallel import DataParallelEngines

NUM_THREADS = 16
"""Number of threads that run the SQL of inference requests. They mostly wait for the database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayStores:
    """The database, and the base's files as a gateway reads them."""

    database: Database
    api_keys: ApiKeys
    registry: AdapterRegistry
    tokenizer: ModelTokenizer
    templates: TenantTemplates


@dataclass(frozen=True, slots=True)
class AssembledGateway:
    services: GatewayServices
    gateway_app: FastAPI
    operations_app: FastAPI
    batches: BatchRunner | None
    """None if this process has no blob store for files."""


@contextmanager
def assemble_gateway(
    settings: Settings,
    directory: DataDirectory,
    model: ModelConfig,
    engine: EngineClient,
    is_loopback: bool,
    several: DataParallelEngines | None = None,
) -> Iterator[AssembledGateway]:
    """Assemble the gateway process, except for its listeners.

    Raises StartRefused. Entering and exiting the context both block. The database belongs to the server, so a database
    with another schema version is refused, not upgraded. `several` has the engines behind `engine`, if it has several.
    """
    with ExitStack() as stack:
        with refused_starts():
            database = Database(settings.resolved_database_url)
            stack.callback(database.close)
            database.check_schema()
            tokenizer = ModelTokenizer.load(settings.model_dir)
            tokens = open_key_authentication(settings.key_authentication)
        info = engine.info
        if info is None:
            raise StartRefused("the engine has just stopped: start the gateway again when its server is ready")
        stores = GatewayStores(
            database=database,
            api_keys=ApiKeys(database, tokens=tokens),
            registry=AdapterRegistry(database, (settings.resolved_served_name,), base_id=info.base_sha256),
            tokenizer=tokenizer,
            templates=open_templates(settings, tokenizer),
        )
        executor = stack.enter_context(ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="services"))
        served = served_model(settings, model, info.max_model_len)
        gateway = open_gateway(stack, settings, directory, served, stores, engine, executor, GatewayMetrics())
        # Without this setting, the blobs are in the server's data directory.
        kept = None
        if settings.blob_url is not None:
            # What an earlier process has left.
            shutil.rmtree(directory.scratch, ignore_errors=True)
            with refused_starts():
                kept = open_batches(settings, directory, database, open_blob_store(settings.blob_url))
        batches = None
        if kept is not None:
            capacity = (lambda: (engine.info or info).max_sequences) if several is None else several.capacity
            room = RoomLimits(capacity=capacity)
            batches = BatchRunner(gateway, kept.files, BatchQueue(database), gateway.metrics.batches, room)
        app = create_openai_app(gateway, kept, is_additional=True)
        engines = {} if several is None else several.engines
        yield AssembledGateway(gateway, app, _operations_app(gateway, settings, is_loopback, engines), batches)


@contextmanager
def refused_starts() -> Iterator[None]:
    """Raise StartRefused with the reason if a store or the base's files cannot be used."""
    try:
        yield
    except (ConfigNotUsable, DatabaseError, StoreError, ModelNotSupported) as error:
        raise StartRefused(str(error)) from error
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).splitlines()[0]
        raise StartRefused(f"the database cannot be used: {reason}") from error


def open_gateway(
    stack: ExitStack,
    settings: Settings,
    directory: DataDirectory,
    model: ModelInfo,
    stores: GatewayStores,
    engine: EngineClient,
    executor: Executor,
    metrics: GatewayMetrics,
    is_held_elsewhere: HeldElsewhere = held_nowhere_else,
    draw: BaseDraw | None = None,
) -> GatewayServices:
    """Open the services behind the OpenAI routes. `stack` closes them. Raises StartRefused."""
    gateway = GatewayServices.compose(
        database=stores.database,
        api_keys=stores.api_keys,
        registry=stores.registry,
        engine=engine,
        tokenizer=stores.tokenizer,
        templates=stores.templates,
        grammars=GrammarChecker(
            settings.model_dir,
            model.vocab_size,
            model.eos_token_ids,
            metrics.grammars.note_check,
            is_sandbox_required=settings.sandbox == "required",
        ),
        model=model,
        executor=executor,
        metrics=metrics,
        spool=SettlementSpool(directory.spool, int(settings.spool_bytes)),
        settings=gateway_settings(settings),
        tracing=open_tracing(settings),
        is_held_elsewhere=is_held_elsewhere,
        draw=draw,
        is_alone=settings.is_database_embedded,
    )
    stack.callback(gateway.close)
    gateway.prompts.grammars.preload()
    return gateway


def open_templates(settings: Settings, tokenizer: ModelTokenizer) -> TenantTemplates:
    return TenantTemplates(
        read_special_tokens(settings.model_dir),
        tokenizer.chat_template,
        is_sandbox_required=settings.sandbox == "required",
    )


def open_batches(settings: Settings, directory: DataDirectory, database: Database, blobs: BlobStore) -> BatchServices:
    """Open the services of files and batches."""
    directory.scratch.mkdir(exist_ok=True)
    return BatchServices.over(database, TenantFiles(database, blobs, directory.scratch, int(settings.max_file_bytes)))


def served_model(settings: Settings, model: ModelConfig, max_model_len: int) -> ModelInfo:
    return ModelInfo(
        served_name=settings.resolved_served_name,
        max_model_len=max_model_len,
        vocab_size=model.vocab_size,
        created_s=int((settings.model_dir / "config.json").stat().st_mtime),
        eos_token_ids=model.eos_token_ids,
        hidden_size=model.hidden_size,
    )


def gateway_settings(settings: Settings) -> GatewaySettings:
    """Return the gateway's settings, with the model's sampling defaults and its pooling.

    Raises StartRefused if the model's files for them cannot be used.
    """
    path = settings.model_dir / GENERATION_FILE
    base_defaults = NO_DEFAULTS
    if settings.generation_config == "auto" and path.is_file():
        try:
            base_defaults = parse_generation_config(path.read_bytes()).defaults
        except AdapterRejected as error:
            raise StartRefused(f"{path} cannot be used: {error}; correct it, or set generation_config to off") from None
    try:
        pooling = base_pooling(settings.model_dir, settings.pooling)
    except AdapterRejected as error:
        raise StartRefused(
            f"{error}; set pooling to last, mean or cls to make embeddings without these files"
        ) from None
    return GatewaySettings(
        pooling=pooling,
        logs_answers=settings.log_answers,
        base_defaults=base_defaults,
        applies_adapter_defaults=settings.adapter_generation_config == "auto",
        base_parsers=AnswerParsers(settings.tool_call_parser, settings.reasoning_parser),
        cors_origins=settings.cors_origins,
        forces_usage=settings.force_include_usage,
        names_tokens_by_id=settings.return_tokens_as_token_ids,
        response_key=None if settings.response_key is None else settings.response_key.get_secret_value().encode(),
        root_path=settings.root_path,
        tier_objectives=parse_objectives(settings.tier_objectives),
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


def revealed(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


def _operations_app(
    gateway: GatewayServices, settings: Settings, is_loopback: bool, engines: Mapping[str, EngineClient]
) -> FastAPI:
    """Return an app with `/metrics` and `/health`, as on a server's admin listener."""
    app = FastAPI(title="loramux gateway", openapi_url=None, docs_url=None, redoc_url=None)
    install_error_handling(app)
    is_open = is_loopback and not settings.trusted_proxies
    token = revealed(settings.metrics_token)
    app.include_router(metrics_router(gateway.metrics, gateway.engine, token, is_open, engines=lambda: engines))
    add_health(app, gateway.database, gateway.engine, gateway.trouble, tells_why=True, engines=engines)
    return app
