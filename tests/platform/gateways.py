from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import httpx2
import uvicorn
from fastapi import FastAPI
from openai import AsyncOpenAI

from loramux.adapter_store.formats.version_files.adapter_task import AdapterTask
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.engine.chat_templates.chat_template import read_special_tokens
from loramux.migrations.database import Database
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenant, Tenants
from loramux.platform.base_draw import BaseDraw
from loramux.platform.batches.services import BatchServices
from loramux.platform.batches.tenant_files import TenantFiles
from loramux.platform.generation.cold_loads import held_nowhere_else
from loramux.platform.generation.settlement_spool import SettlementSpool
from loramux.platform.grammars.checker import GrammarChecker
from loramux.platform.ledger.events import Ledger, UsageEvent
from loramux.platform.listener.app import create_openai_app
from loramux.platform.quotas.policies import QuotaPolicies
from loramux.platform.replicas.routed_engine import RoutedEngine
from loramux.platform.requests.services import GatewayServices, GatewaySettings, ModelInfo
from loramux.platform.telemetry.tracing import Tracing
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tokenizer.tenant_templates import TenantTemplates
from tests.adapter_store.memory_blobs import MemoryBlobStore
from tests.demo_base import DEMO_BASE
from tests.platform.ready_adapters import add_ready_adapter, digest_of
from tests.platform.scripted_engine import ScriptedEngine
from tests.shared_forks import shared_forks


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    services: GatewayServices
    app: FastAPI
    engine: ScriptedEngine
    database: Database
    http: httpx.AsyncClient
    openai: AsyncOpenAI
    key: str
    tenant: Tenant
    kept: BatchServices

    def usage(self) -> list[UsageEvent]:
        return list(Ledger(self.database).events(None, limit=100).data)[::-1]

    def key_of(self, tenant: str, *scopes: str) -> str:
        tenants = Tenants(self.database)
        owner = tenants.get(tenant) or tenants.create(tenant)
        return self.services.callers.api_keys.create(owner.id, "test", scopes or None).secret

    def limit(self, metric: str, limit: int) -> None:
        QuotaPolicies(self.database).set(self.tenant.id, metric, limit)

    def add_adapter(
        self,
        tenant: str,
        name: str,
        versions: int = 1,
        files: Mapping[str, bytes] | None = None,
        invocation_tokens: Sequence[int] = (),
        task: AdapterTask | None = None,
    ) -> str:
        """Add an adapter with ready versions and return its identifier. The last version is the default.

        `files` are the optional files of each version, by name; `invocation_tokens` activate each version, and `task`
        is what each is for.
        """
        tenants = Tenants(self.database)
        owner = tenants.get(tenant) or tenants.create(tenant)
        digests = [digest_of(f"{tenant}/{name}@{number}") for number in range(1, versions + 1)]
        return add_ready_adapter(self.database, owner.id, name, digests, files, invocation_tokens, task=task)


def batches_in_memory(database: Database) -> BatchServices:
    """The services of files and batches. The contents of files are in memory."""
    return BatchServices.over(database, TenantFiles(database, MemoryBlobStore(), Path(tempfile.gettempdir()), 1 << 20))


@asynccontextmanager
async def open_gateway(
    database: Database,
    tokenizer: ModelTokenizer,
    executor: Executor,
    settings: GatewaySettings | None = None,
    spool: SettlementSpool | None = None,
    tracing: Tracing | None = None,
    max_model_len: int = 256,
    routed: tuple[RoutedEngine, ScriptedEngine] | None = None,
    draw: BaseDraw | None = None,
    clock: Callable[[], float] = time.monotonic,
    is_alone: bool = False,
) -> AsyncIterator[Gateway]:
    """Open a gateway over a new scripted engine or, with `routed`, over a routed engine and its scripted engine.

    With `draw`, versions must be valid for one of its bases.
    """
    engine = ScriptedEngine(max_model_len=max_model_len) if routed is None else routed[1]
    api_keys = ApiKeys(database, "the operator's key of 32 characters")
    with shared_forks():
        templates = TenantTemplates(read_special_tokens(DEMO_BASE), tokenizer.chat_template)
        grammars = GrammarChecker(DEMO_BASE, 1024, (1,))
    services = GatewayServices.compose(
        database=database,
        api_keys=api_keys,
        registry=AdapterRegistry(database, base_id=None if draw is None else draw.own),
        engine=engine if routed is None else routed[0],
        tokenizer=tokenizer,
        templates=templates,
        grammars=grammars,
        model=ModelInfo(
            hidden_size=3,
            served_name="base",
            max_model_len=max(1024, max_model_len),
            vocab_size=1024,
            created_s=1_700_000_000,
            eos_token_ids=(1,),
        ),
        executor=executor,
        settings=settings,
        spool=spool,
        tracing=tracing,
        is_held_elsewhere=held_nowhere_else if routed is None else routed[0].holds_elsewhere,
        draw=draw,
        clock=clock,
        is_alone=is_alone,
    )
    tenants = services.callers.tenants
    tenant = tenants.get("acme") or tenants.create("acme")
    key = api_keys.create(tenant.id, "test").secret
    kept = batches_in_memory(database)
    app = create_openai_app(services, kept)
    headers = {"authorization": f"Bearer {key}"}
    async with (
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway", headers=headers) as http,
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app)) as transport,
        AsyncOpenAI(api_key=key, base_url="http://gateway/v1", http_client=transport, max_retries=0) as client,
    ):
        yield Gateway(
            services=services,
            app=app,
            engine=engine,
            database=database,
            http=http,
            openai=client,
            key=key,
            tenant=tenant,
            kept=kept,
        )
        assert await services.run.requests.drain(60)
        assert engine.num_running == 0
        services.close()


class _QuietServer(uvicorn.Server):
    """A server that installs no signal handlers and sets an event once it is listening."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[str]:
    config = uvicorn.Config(app, port=0, lifespan="off", ws="none", log_config=None)
    server = _QuietServer(config)
    serving = asyncio.create_task(server.serve())
    await server.is_listening.wait()
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    await serving
