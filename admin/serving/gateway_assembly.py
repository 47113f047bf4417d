"""Assembles a gateway without administration: database, services, the OpenAI app, metrics and health."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from fastapi import FastAPI
from sqlalchemy.exc import SQLAlchemyError

from loramux.adapter_store.extensions import ExtensionRefused
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.admin.errors import StartRefused
from loramux.admin.server.data_directory import DataDirectory
from loramux.admin.server.metrics_route import metrics_router
from loramux.admin.server.settings import Settings
from loramux.admin.serving.assembly import NUM_THREADS, gateway_settings, open_tracing
from loramux.engine.architectures.model_config import ModelConfig
from loramux.migrations.database import Database, DatabaseError
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.key_authentication import open_key_authentication
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.engine_link.engine_client import EngineClient
from loramux.platform.generation.maintenance import Maintenance
from loramux.platform.generation.running_requests import RunningRequests
from loramux.platform.generation.settlement_spool import SettlementSpool
from loramux.platform.grammars.checker import GrammarChecker
from loramux.platform.openai_api.app import create_openai_app
from loramux.platform.openai_api.error_responses import install_error_handling
from loramux.platform.openai_api.health import health_router
from loramux.platform.openai_api.services import GatewayServices, ModelInfo
from loramux.platform.telemetry.metrics import GatewayMetrics
from loramux.platform.tokenizer.chat_template import ModelFilesError, read_special_tokens
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tokenizer.tenant_templates import TenantTemplates


@dataclass(frozen=True, slots=True)
class AssembledGateway:
    gateway_app: FastAPI
    operations_app: FastAPI
    running: RunningRequests
    maintenance: Maintenance
    metrics: GatewayMetrics


@contextmanager
def assemble_gateway(
    settings: Settings, directory: DataDirectory, model: ModelConfig, engine: EngineClient, is_loopback: bool
) -> Iterator[AssembledGateway]:
    """Assemble the gateway process, except for its listeners.

    Raises StartRefused. Entering and exiting the context both block. The database belongs to the server, so a database
    with another schema version is refused, not upgraded.
    """
    with ExitStack() as stack:
        try:
            database = Database(settings.resolved_database_url)
            stack.callback(database.close)
            database.check_schema()
            tokenizer = ModelTokenizer.load(settings.model)
            tokens = open_key_authentication(settings.key_authentication)
        except (DatabaseError, ExtensionRefused, ModelFilesError) as error:
            raise StartRefused(str(error)) from error
        except SQLAlchemyError as error:
            reason = str(getattr(error, "orig", None) or error).splitlines()[0]
            raise StartRefused(f"the database cannot be used: {reason}") from error
        info = engine.info
        if info is None:
            raise StartRefused("the engine has just stopped: start the gateway again when its server is ready")
        executor = stack.enter_context(ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="services"))
        metrics = GatewayMetrics()
        templates = TenantTemplates(read_special_tokens(settings.model), tokenizer.chat_template)
        gateway = GatewayServices.compose(
            database=database,
            tenants=Tenants(database),
            api_keys=ApiKeys(database, tokens=tokens),
            registry=AdapterRegistry(database, (settings.resolved_served_name,), base_id=info.base_sha256),
            engine=engine,
            tokenizer=tokenizer,
            templates=templates,
            grammars=GrammarChecker(settings.model, model.vocab_size, model.eos_token_ids, metrics.note_grammar),
            model=ModelInfo(
                served_name=settings.resolved_served_name,
                max_model_len=info.max_model_len,
                vocab_size=model.vocab_size,
                created_s=int((settings.model / "config.json").stat().st_mtime),
                eos_token_ids=model.eos_token_ids,
            ),
            executor=executor,
            metrics=metrics,
            settings=gateway_settings(settings),
            tracing=open_tracing(settings),
            spool=SettlementSpool(directory.spool, int(settings.spool_bytes)),
        )
        stack.callback(gateway.close)
        gateway.grammars.preload()
        yield AssembledGateway(
            create_openai_app(gateway),
            _operations_app(gateway, settings, is_loopback),
            gateway.running,
            gateway.maintenance,
            gateway.metrics,
        )


def _operations_app(gateway: GatewayServices, settings: Settings, is_loopback: bool) -> FastAPI:
    """Return an app with `/metrics` and `/health`, as on a server's admin listener."""
    app = FastAPI(title="loramux gateway", openapi_url=None, docs_url=None, redoc_url=None)
    install_error_handling(app)
    token = None if settings.metrics_token is None else settings.metrics_token.get_secret_value()
    is_open = is_loopback and not settings.trusted_proxies
    app.include_router(metrics_router(gateway.metrics, gateway.engine, token, is_open))
    app.include_router(health_router(gateway.database, gateway.engine, gateway.trouble, tells_why=True))
    return app
