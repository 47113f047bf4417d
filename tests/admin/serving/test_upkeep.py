from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from loramux.adapter_store.registry.base_servers import OwnServer
from loramux.admin.serving import upkeep
from loramux.admin.serving.upkeep import Upkeep
from loramux.platform.evals.canaries import Canaries
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

    running = asyncio.create_task(Upkeep(services).run(own, draining))
    await until("serving")
    draining.set()
    await until("draining")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_an_unexpected_error_ends_no_periodic_work(
    admin_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alias that disappears while canaries are read, and a directory of weights that another process locks."""
    services, num_calls = admin_side.services, dict.fromkeys(("canaries", "reports", "copies"), 0)
    all_twice = asyncio.Event()
    own = OwnServer(services.database, "a" * 64, "llama", "host:8000")

    def failing(name: str) -> Callable[..., None]:
        def fail(*_: object) -> None:
            num_calls[name] += 1
            if min(num_calls.values()) >= 2:
                loop.call_soon_threadsafe(all_twice.set)
            raise ValueError(name)

        return fail

    loop = asyncio.get_running_loop()
    for interval in ("LOOK_INTERVAL_S", "PURGE_INTERVAL_S", "REPORT_INTERVAL_S"):
        monkeypatch.setattr(upkeep, interval, 0.01)
    monkeypatch.setattr(Canaries, "check", failing("canaries"))
    monkeypatch.setattr(OwnServer, "report", failing("reports"))
    monkeypatch.setattr(type(services.adapters.ingest.purged_blobs), "digests", failing("copies"))
    running = asyncio.create_task(Upkeep(services).run(own, asyncio.Event()))
    async with asyncio.timeout(20):
        await all_twice.wait()
    assert not running.done()
    running.cancel()
    await asyncio.wait({running})
