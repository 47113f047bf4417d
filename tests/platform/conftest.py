"""Accounts on real databases with a fake clock, and a complete gateway over a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loramux.migrations.database import Database
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenant, Tenants
from loramux.platform.admission import database_health
from loramux.platform.generation import running_requests, settler
from loramux.platform.listener import health
from loramux.platform.requests import services
from loramux.platform.requests.services import GatewaySettings
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.migrated import migrate, migrated_sqlite
from tests.platform.clocked_databases import FakeClock, empty, with_shared_connections
from tests.platform.gateways import Gateway, listening, open_gateway
from tests.platform.harmony_base import make_harmony_base
from tests.platform.storing import KEY, allow, answers
from tests.platform.tool_base import make_tool_base
from tests.postgres import create_database

WAITS = (
    (database_health, "STALLED_S"),
    (database_health, "SILENT_S"),
    (health, "DATABASE_WAIT_S"),
    (running_requests, "RESERVE_WAIT_S"),
    (services, "CALL_WAIT_S"),
    (settler, "SETTLE_WAIT_S"),
)
"""How long a gateway waits for its database."""


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="session")
def sqlite_accounts_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return migrated_sqlite(tmp_path_factory.mktemp("platform") / "loramux.db")


@pytest.fixture(scope="session")
def postgres_accounts_url(postgres_server: str) -> str:
    url = create_database(postgres_server, "platform_accounts")
    migrate(url)
    return url


@pytest.fixture(scope="session")
def sqlite_accounts(sqlite_accounts_url: str) -> Iterator[Database]:
    database = Database(sqlite_accounts_url)
    yield database
    database.close()


@pytest.fixture(scope="session")
def postgres_accounts(postgres_accounts_url: str) -> Iterator[Database]:
    database = Database(postgres_accounts_url)
    yield database
    database.close()


@pytest.fixture(params=["sqlite", "postgres"])
def clocked(request: pytest.FixtureRequest, clock: FakeClock) -> Iterator[Database]:
    """Yield an empty database of each kind. Each is migrated once and emptied after each test."""
    database = with_shared_connections(request.getfixturevalue(f"{request.param}_accounts"), clock)
    yield database
    empty(database)


@pytest.fixture
def accounts(sqlite_accounts: Database) -> Iterator[Database]:
    database = with_shared_connections(sqlite_accounts)
    yield database
    empty(database)


@pytest.fixture
def acme(clocked: Database) -> Tenant:
    return Tenants(clocked).create("acme")


@pytest.fixture
def acme_key(clocked: Database, acme: Tenant) -> str:
    """The identifier of one of acme's keys."""
    return ApiKeys(clocked).create(acme.id, "test").key.id


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tokenizer(demo_base: Path) -> ModelTokenizer:
    return ModelTokenizer.load(demo_base)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture(autouse=True)
def patience() -> Iterator[None]:
    """On a busy machine, a thread can take seconds for a transaction. The gateway would refuse the test's requests, or
    leave their settlements to an upkeep that few tests run.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module, name in WAITS:
            patch.setattr(module, name, 60.0)
        yield


@pytest.fixture
async def gateway(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, anyio_backend: str
) -> AsyncIterator[Gateway]:
    """A gateway on SQLite. Its engine repeats the prompt. The context is 256 tokens and the vocabulary 1024."""
    async with open_gateway(accounts, tokenizer, threads) as gateway:
        yield gateway


@pytest.fixture(scope="session")
def tool_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return ModelTokenizer.load(make_tool_base(tmp_path_factory.mktemp("tool_base")))


@pytest.fixture(scope="session")
def harmony_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return ModelTokenizer.load(make_harmony_base(tmp_path_factory.mktemp("harmony_base")))


@pytest.fixture
async def tools(
    accounts: Database, tool_tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, anyio_backend: str
) -> AsyncIterator[Gateway]:
    """A gateway whose base has a chat template with tools and thinking."""
    async with open_gateway(accounts, tool_tokenizer, threads, max_model_len=1024) as gateway:
        yield gateway


@pytest.fixture
async def storing(
    accounts: Database, tool_tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, anyio_backend: str
) -> AsyncIterator[Gateway]:
    """A gateway that stores the responses and chat completions of the tenant acme. It answers "Secret answer"."""
    settings = GatewaySettings(response_key=KEY)
    async with open_gateway(accounts, tool_tokenizer, threads, settings, max_model_len=1024) as gateway:
        allow(accounts, gateway.tenant.id)
        answers(gateway, "Secret answer")
        yield gateway


@pytest.fixture
async def gateway_on_each(
    clocked: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, anyio_backend: str
) -> AsyncIterator[Gateway]:
    async with open_gateway(clocked, tokenizer, threads) as gateway:
        yield gateway


@pytest.fixture
async def gateway_url(gateway: Gateway) -> AsyncIterator[str]:
    async with listening(gateway.app) as url:
        yield url
