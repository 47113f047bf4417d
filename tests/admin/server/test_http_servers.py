from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from structlog.testing import capture_logs

from loramux.admin.server import http_servers
from loramux.admin.server.http_servers import HttpServer, serve_until_stopped
from loramux.admin.server.listeners import bind, url_of
from loramux.admin.server.stop_signals import StopSignals
from loramux.migrations.database import Database
from loramux.platform.listener.health import add_health, begin_drain
from tests.platform.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def settings_of_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep what a server changes in its process."""
    monkeypatch.setattr(http_servers, "freeze_gc", lambda: None)
    interval_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval_s)


class HeldRequest:
    """An app that answers when `release` is set."""

    def __init__(self) -> None:
        self.has_begun, self.release = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.has_begun.set()
        await self.release.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})


async def test_a_server_is_not_ready_while_it_drains(tmp_path: Path) -> None:
    database, signals = Database(f"sqlite:///{tmp_path}/db"), StopSignals()
    announced, held = asyncio.Event(), HeldRequest()
    admin = FastAPI()
    add_health(admin, database, ScriptedEngine(), tells_why=True)

    async def stop_engine() -> None:
        raise AssertionError("the request ended in time")

    with bind("127.0.0.1", 0, "port") as openai_port, bind("127.0.0.1", 0, "admin_port") as admin_port:
        serving = asyncio.create_task(
            serve_until_stopped(
                HttpServer(held, openai_port),
                HttpServer(admin, admin_port),
                signals,
                60.0,
                announced.set,
                partial(begin_drain, admin),
                stop_engine,
            )
        )
        await announced.wait()
        async with httpx.AsyncClient(trust_env=False, timeout=30) as http:
            running = asyncio.create_task(http.get(url_of(openai_port)))
            await held.has_begun.wait()
            assert (await http.get(f"{url_of(admin_port)}/health/ready")).status_code == 200
            with capture_logs() as logged:
                signals.ask()
                ready = await http.get(f"{url_of(admin_port)}/health/ready")
            (told,) = logged
            assert told["event"].startswith("stopping: running requests have drain_s to finish")
            assert (told["num_requests"], told["drain_s"]) == (1, 60.0)
            assert (ready.status_code, ready.json()["status"]) == (503, "not ready")
            assert ready.json()["reason"] == "the server is stopping"
            assert (await http.get(f"{url_of(admin_port)}/health/live")).status_code == 200
            held.release.set()
            assert (await running).text == "done"
        await serving
    database.close()
