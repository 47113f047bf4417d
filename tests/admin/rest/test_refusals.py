from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import insert

from loramux.adapter_store.registry.aliases import AdapterAliases
from loramux.adapter_store.registry.base_servers import OwnServer
from loramux.admin.serving.app import create_admin_app
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import adapter_versions
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.bodies import request_body
from tests.admin.admin_side import AdminSide
from tests.admin.app_client import client_of

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[3] / "docs" / "endpoints.md"
BASE = "/admin/v1"
DOCUMENTED = {
    what: (int(status), code)
    for what, status, code in re.findall(r"^\| ([^|]+) \| (\d{3}) \| `(\w+)` \|$", PAGE.read_text(), re.MULTILINE)
}


class Caller:
    def __init__(self, http: httpx.AsyncClient, key_id: str, adapter_id: str) -> None:
        self.http = http
        self.key_id = key_id
        self.adapter_id = adapter_id

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post(BASE + path, json=body, headers=named)

    async def rename(self, **headers: str) -> httpx.Response:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.patch(f"{BASE}/tenants/refused", json={"display_name": "R"}, headers=named)

    async def delete(self, path: str) -> httpx.Response:
        return await self.http.delete(BASE + path)

    async def slow(self) -> httpx.Response:
        async def forever() -> AsyncIterator[bytes]:
            yield b'{"slug":'
            await asyncio.sleep(30)

        return await self.http.post(f"{BASE}/tenants", content=forever())

    async def repeat(self) -> httpx.Response:
        assert (await self.post("/tenants", {"slug": "once"}, idempotency_key="once")).status_code == 201
        return await self.post("/tenants", {"slug": "twice"}, idempotency_key="once")

    async def demote(self) -> httpx.Response:
        return await self.http.patch(
            f"{BASE}/api_keys/{self.key_id}", json={"scopes": ["platform:read"]}, headers={"if-match": "*"}
        )


CALLS: dict[str, Callable[[Caller], Awaitable[httpx.Response]]] = {
    "a name that is a path, such as `../../etc`": lambda caller: caller.post("/tenants", {"slug": "../../etc"}),
    "a name with a look-alike letter, such as a Cyrillic `а`": lambda caller: caller.post(
        "/adapters", {"tenant": "refused", "name": "\u0430dapter"}
    ),
    "text with bidirectional or other control characters": lambda caller: caller.post(
        "/api_keys", {"tenant": "refused", "name": "a\u202eb\x07"}
    ),
    "an unknown field": lambda caller: caller.post("/tenants", {"slug": "other", "colour": "red"}),
    "a field of the wrong type": lambda caller: caller.post("/tenants", {"slug": 7}),
    "a duplicate field, or a body that is not JSON": lambda caller: caller.http.post(
        f"{BASE}/tenants", content=b'{"slug": "a", "slug": "b"}'
    ),
    "a body larger than 64 KiB": lambda caller: caller.post("/tenants", {"slug": "x" * 70_000}),
    "a body that does not arrive completely": Caller.slow,
    "a PATCH without `If-Match`": lambda caller: caller.rename(),
    "a change with an outdated `If-Match`": lambda caller: caller.rename(if_match='"0123456789abcdef"'),
    "an `Idempotency-Key` reused with another body": Caller.repeat,
    "revoking the platform's last administrator key": lambda caller: caller.delete(f"/api_keys/{caller.key_id}"),
    "removing the administrator's scope from that key": Caller.demote,
    "deleting a tenant that has adapters, unrevoked keys, prices or usage": lambda caller: caller.delete(
        "/tenants/refused"
    ),
    "deleting an adapter that has versions": lambda caller: caller.delete(f"/adapters/{caller.adapter_id}"),
    "archiving a version that an alias names": lambda caller: caller.post(
        f"/adapters/{caller.adapter_id}/versions/1/archive", {}
    ),
    "forgetting a base that a server serves": lambda caller: caller.delete(f"/bases/{'b' * 64}"),
    "dividing requests between bases with different tokenizers": lambda caller: caller.http.put(
        f"{BASE}/bases/weights", json={"weights": [{"base": base * 64, "weight": 1} for base in "bc"]}
    ),
}


@pytest.fixture(scope="module")
def made(console_side: AdminSide) -> tuple[Any, str, str, str]:
    """A server without an operator key. Its only administrator key is one of its tenant's keys."""
    services = console_side.services
    keys = ApiKeys(services.database)
    services = replace(services, accounts=replace(services.accounts, api_keys=keys))
    key = services.accounts.api_keys.create(None, "last", ["platform:admin"])
    tenant = services.accounts.tenants.create("refused")
    adapter = services.adapters.registry.create_adapter(tenant.id, "support")
    values = {"state": "ready", "digest": "d" * 64, "upload_id": new_id("upl"), "report": {}, "created_us": 1}
    with services.database.write() as connection:
        connection.execute(insert(adapter_versions).values(**values, id=new_id("adv"), adapter_id=adapter.id, number=1))
    OwnServer(services.database, "b" * 64, "llama", "host:8000", "e" * 64).report(is_draining=False)
    services.adapters.bases.register("c" * 64, "llama", "f" * 64)
    AdapterAliases(services.database).set(adapter.id, "default", {1: 100})
    return create_admin_app(services), key.key.id, key.secret, adapter.id


def test_documented_errors_match_the_calls_here() -> None:
    assert set(DOCUMENTED) == set(CALLS)


@pytest.mark.parametrize("what", CALLS)
async def test_bad_input_gets_the_documented_error(
    what: str, made: tuple[Any, str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "BODY_TIMEOUT_S", 0.2)
    app, key_id, secret, adapter_id = made
    async with client_of(app) as http:
        http.headers["authorization"] = f"Bearer {secret}"
        answer = await CALLS[what](Caller(http, key_id, adapter_id))
        still = await http.get(f"{BASE}/tenants/refused")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == DOCUMENTED[what]
    assert len(error["message"]) < 300
    assert not {"\u202e", "\x07", "../", "\u0430", "xxx"} & set(error["message"].split())
    assert (still.status_code, still.json()["display_name"]) == (200, "refused")
