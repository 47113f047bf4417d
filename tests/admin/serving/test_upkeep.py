from __future__ import annotations

import asyncio

import pytest

from loramux.adapter_store.registry.base_servers import OwnServer
from loramux.admin.serving.upkeep import Upkeep
from tests.admin.admin_side import AdminSide

pytestmark = pytest.mark.anyio


async def test_a_server_reports_that_it_serves_and_that_it_drains(admin_side: AdminSide) -> None:
    services = admin_side.services
    own = OwnServer(services.database, "a" * 64, "llama", "host:8000")
    draining = asyncio.Event()

    async def until(state: str) -> None:
        for _ in range(3000):
            if [server.state for base in services.adapters.bases.list() for server in base.servers] == [state]:
                return
            await asyncio.sleep(0.01)
        pytest.fail(f"the server is never {state}")

    upkeep = asyncio.create_task(Upkeep(services).run(own, draining))
    await until("serving")
    draining.set()
    await until("draining")
    upkeep.cancel()
    with pytest.raises(asyncio.CancelledError):
        await upkeep
