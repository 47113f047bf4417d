from __future__ import annotations

import asyncio

import pytest

from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenants
from tests.platform.gateways import Gateway
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio


async def test_only_the_tenants_own_requests_are_counted(gateway: Gateway) -> None:
    other = Tenants(gateway.database).create("other")
    key = ApiKeys(gateway.database).create(other.id, "test").secret
    gateway.engine.script = lambda add: Script(token_ids=(5,) * 8, stall_after=0)

    async def loads() -> list[int]:
        headers = ({}, {"authorization": f"Bearer {key}"})
        return [(await gateway.http.get("/load", headers=one)).json()["server_load"] for one in headers]

    assert await loads() == [0, 0]
    body = {"model": "base", "prompt": ["a", "b"], "max_tokens": 8}
    asking = [asyncio.create_task(gateway.http.post("/v1/completions", json=body)) for _ in range(2)]
    async with asyncio.timeout(60):
        while await loads() != [2, 0]:  # noqa: ASYNC110 - nothing tells that a request has been admitted
            await asyncio.sleep(0.01)
    gateway.engine.die()
    assert [answer.status_code for answer in await asyncio.gather(*asking)] == [503, 503]
    async with asyncio.timeout(60):
        while await loads() != [0, 0]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
