from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from fastapi import FastAPI

from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.engine.chat_templates.chat_template import read_special_tokens
from loramux.migrations.database import Database
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.grammars.checker import GrammarChecker
from loramux.platform.listener.app import create_openai_app
from loramux.platform.requests.services import GatewayServices, ModelInfo
from loramux.platform.runtime_adapters.load_sources import LoadSources
from loramux.platform.runtime_adapters.runtime_adapters import RuntimeAdapters
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tokenizer.tenant_templates import TenantTemplates
from tests.admin.admin_side import AdminSide
from tests.admin.running_server import start_server
from tests.platform.gateways import batches_in_memory
from tests.platform.scripted_engine import ScriptedEngine
from tests.shared_forks import shared_forks

CONTEXT = 256


@contextmanager
def open_services(database: Database, demo_base: Path) -> Iterator[GatewayServices]:
    with shared_forks():
        templates, grammars = TenantTemplates(read_special_tokens(demo_base)), GrammarChecker(demo_base, 1024, (1,))
    with ThreadPoolExecutor(4) as executor:
        services = GatewayServices.compose(
            database=database,
            api_keys=ApiKeys(database),
            registry=AdapterRegistry(database),
            engine=ScriptedEngine(max_model_len=CONTEXT),
            tokenizer=ModelTokenizer.load(demo_base),
            templates=templates,
            grammars=grammars,
            model=ModelInfo(served_name="the-base", max_model_len=CONTEXT, vocab_size=1024, created_s=1_700_000_000),
            executor=executor,
        )
        yield services
        services.close()


def whole_app(services: GatewayServices, side: AdminSide) -> FastAPI:
    """An app with all routes that a server can have."""
    adapters = side.services.adapters
    sources = LoadSources(("file:///srv/loras/{tenant}",))
    loads = RuntimeAdapters(services, adapters.registry, adapters.ingest, sources, services.executor, 256)
    return create_openai_app(services, batches_in_memory(services.database), loads)


@contextmanager
def served(make_app: Callable[[], FastAPI]) -> Iterator[str]:
    """Serve an app on a real listener in a thread and yield its URL."""
    running = start_server(make_app())
    try:
        yield running.url
    finally:
        running.stop()
