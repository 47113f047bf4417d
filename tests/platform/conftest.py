"""Accounts on real databases with a clock that the test moves, and a whole gateway over a scripted engine."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import httpx2
import psycopg
import pytest
import uvicorn
from fastapi import FastAPI
from openai import AsyncOpenAI
from sqlalchemy import delete, insert

from loramux.adapter_store.registry.aliases import change_alias
from loramux.adapter_store.registry.records import AliasTarget
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import metadata
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenant, Tenants
from loramux.platform.engine_link.scripted_engine import ScriptedEngine
from loramux.platform.generation.settlement_spool import SettlementSpool
from loramux.platform.ledger.events import Ledger, UsageEvent
from loramux.platform.openai_api.app import create_openai_app
from loramux.platform.openai_api.services import GatewayServices, GatewaySettings, ModelInfo
from loramux.platform.quotas.policies import QuotaPolicies
from loramux.platform.telemetry.tracing import Tracing
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.migrated import migrate, migrated_sqlite

START_US = 1_800_000_000_000_000


class FakeClock:
    """Microseconds that only the test moves."""

    def __init__(self) -> None:
        self.now_us = START_US

    def __call__(self) -> int:
        return self.now_us

    def advance(self, seconds: float) -> None:
        self.now_us += round(seconds * 1_000_000)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="session")
def sqlite_accounts_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return migrated_sqlite(tmp_path_factory.mktemp("platform") / "loramux.db")


@pytest.fixture(scope="session")
def postgres_accounts_url(postgres_server: str) -> str:
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute("CREATE DATABASE platform_accounts")
    url = postgres_server.replace("/postgres?", "/platform_accounts?", 1)
    migrate(url)
    return url


@pytest.fixture(params=["sqlite", "postgres"])
def clocked(request: pytest.FixtureRequest, clock: FakeClock) -> Iterator[Database]:
    """An empty database of each kind that lives by the fake clock; migrated once, emptied after each test."""
    database = Database(request.getfixturevalue(f"{request.param}_accounts_url"), clock)
    yield database
    _empty(database)
    database.close()


@pytest.fixture
def accounts(sqlite_accounts_url: str) -> Iterator[Database]:
    """An empty SQLite database on the real clock, for tests in which SQL is not the point."""
    database = Database(sqlite_accounts_url)
    yield database
    _empty(database)
    database.close()


@pytest.fixture
def acme(clocked: Database) -> Tenant:
    return Tenants(clocked).create("acme")


@pytest.fixture
def acme_key(clocked: Database, acme: Tenant) -> str:
    """The identifier of a key of acme's."""
    return ApiKeys(clocked).create(acme.id, "test").key.id


def _empty(database: Database) -> None:
    with database.write() as connection:
        for table in reversed(metadata.sorted_tables):
            connection.execute(delete(table))


# The gateway


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A whole gateway over a scripted engine, reached over HTTP without a socket."""

    services: GatewayServices
    app: FastAPI
    engine: ScriptedEngine
    database: Database
    http: httpx.AsyncClient
    openai: AsyncOpenAI
    key: str
    tenant: Tenant

    def usage(self) -> list[UsageEvent]:
        return list(Ledger(self.database).events(None, limit=100).data)[::-1]

    def key_of(self, tenant: str, *scopes: str) -> str:
        tenants = Tenants(self.database)
        owner = tenants.get(tenant) or tenants.create(tenant)
        return self.services.api_keys.create(owner.id, "test", scopes or None).secret

    def limit(self, metric: str, limit: int) -> None:
        QuotaPolicies(self.database).set(self.tenant.id, metric, limit)

    def add_adapter(self, tenant: str, name: str, versions: int = 1) -> str:
        """An adapter whose versions are ready; the last is the default. Returns its identifier."""
        tenants = Tenants(self.database)
        owner = tenants.get(tenant) or tenants.create(tenant)
        adapter_id = new_id("ada")
        with self.database.write() as connection:
            connection.execute(
                insert(schema.adapters).values(id=adapter_id, tenant_id=owner.id, name=name, created_us=0)
            )
            for number in range(1, versions + 1):
                version_id = new_id("adv")
                connection.execute(
                    insert(schema.adapter_versions).values(
                        id=version_id,
                        adapter_id=adapter_id,
                        number=number,
                        state="ready",
                        digest=hashlib.sha256(f"{tenant}/{name}@{number}".encode()).hexdigest(),
                        max_rank=8,
                        num_pages=1,
                        canonical_bytes=1,
                        upload_id=new_id("upl"),
                        report={},
                        created_us=0,
                        ready_us=0,
                    )
                )
            default = [AliasTarget(version_id, versions, 100)]
            change_alias(connection, adapter_id, "default", default, "system", "set", 0)
        return adapter_id


@pytest.fixture(scope="session")
def tokenizer(demo_base: Path) -> ModelTokenizer:
    return ModelTokenizer.load(demo_base)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@asynccontextmanager
async def open_gateway(
    database: Database,
    tokenizer: ModelTokenizer,
    executor: Executor,
    settings: GatewaySettings | None = None,
    spool: SettlementSpool | None = None,
    tracing: Tracing | None = None,
) -> AsyncIterator[Gateway]:
    engine = ScriptedEngine(max_model_len=256)
    tenants, api_keys = Tenants(database), ApiKeys(database, "the operator's key of 32 characters")
    services = GatewayServices.compose(
        database=database,
        tenants=tenants,
        api_keys=api_keys,
        registry=AdapterRegistry(database),
        engine=engine,
        tokenizer=tokenizer,
        model=ModelInfo(served_name="base", max_model_len=1024, vocab_size=1024, created_s=1_700_000_000),
        executor=executor,
        settings=settings,
        spool=spool,
        tracing=tracing,
    )
    tenant = tenants.create("acme")
    key = api_keys.create(tenant.id, "test").secret
    app = create_openai_app(services)
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
        )
        assert await services.running.drain(5)
        assert engine.num_running == 0
        services.close()


@pytest.fixture
async def gateway(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, anyio_backend: str
) -> AsyncIterator[Gateway]:
    """A gateway on SQLite whose engine repeats the prompt; context 256, vocabulary 1024."""
    async with open_gateway(accounts, tokenizer, threads) as gateway:
        yield gateway


@pytest.fixture
async def gateway_on_each(
    clocked: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, anyio_backend: str
) -> AsyncIterator[Gateway]:
    """A gateway on each kind of database, by the fake clock."""
    async with open_gateway(clocked, tokenizer, threads) as gateway:
        yield gateway


class _QuietServer(uvicorn.Server):
    """A server that leaves the test process's signals alone and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@pytest.fixture
async def gateway_url(gateway: Gateway) -> AsyncIterator[str]:
    """The gateway behind a real socket, for what needs one: bytes that arrive early and clients that leave."""
    config = uvicorn.Config(gateway.app, port=0, lifespan="off", ws="none", log_config=None)
    server = _QuietServer(config)
    serving = asyncio.create_task(server.serve())
    await server.is_listening.wait()
    port = server.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    await serving
