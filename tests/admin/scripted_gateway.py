"""A gateway of ours over a scripted engine, which other code calls as any OpenAI API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from loramux.admin.client.openai_server import OpenAIServer
from loramux.engine.protocol.messages import Add
from loramux.migrations.database import Database
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.listener.app import create_openai_app
from tests.admin.openai_side import open_services, served
from tests.migrated import migrated_sqlite
from tests.platform.gateways import batches_in_memory
from tests.platform.scripted_engine import Script, ScriptedEngine, echo

MODEL = "the-base"


@dataclass(frozen=True, slots=True)
class Gateway:
    server: OpenAIServer
    engine: ScriptedEngine
    variables: dict[str, str]
    """The environment with which commands find the gateway."""


@contextmanager
def open_gateway(directory: Path, demo_base: Path, script: Callable[[Add], Script] = echo) -> Iterator[Gateway]:
    database = Database(migrated_sqlite(directory / "gateway.db"))
    tenant = Tenants(database).create("acme")
    secret = ApiKeys(database).create(tenant.id, "bench").secret
    with open_services(database, demo_base) as services:
        engine = services.engine
        assert isinstance(engine, ScriptedEngine)
        engine.script = script
        with served(lambda: create_openai_app(services, batches_in_memory(services.database))) as url:
            variables = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": secret, "XDG_CONFIG_HOME": str(directory)}
            yield Gateway(OpenAIServer(url=f"{url}/v1", key=secret), engine, variables)
    database.close()
