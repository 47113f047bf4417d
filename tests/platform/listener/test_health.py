from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from loramux.migrations.database import Database
from loramux.platform.listener.health import add_health
from tests.platform.scripted_engine import Script, ScriptedEngine

pytestmark = pytest.mark.anyio


async def test_ready_requires_the_engine_and_the_database(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    del gateway.http.headers["authorization"]
    assert (await gateway.http.get("/health/live")).json() == {"status": "live"}
    ready = await gateway.http.get("/health/ready")
    assert (ready.status_code, ready.json()) == (200, {"status": "ready", "engine": True, "database": True})
    gateway.engine.die()
    down = await gateway.http.get("/health/ready")
    assert (down.status_code, down.json()["engine"]) == (503, False)
    gateway.engine.revive()
    nowhere = Database("postgresql://nobody@127.0.0.1:1/none")
    monkeypatch.setattr(gateway.database, "read", nowhere.read)
    cut = await gateway.http.get("/health/ready")
    assert (cut.status_code, cut.json()["database"]) == (503, False)
    assert (await gateway.http.get("/health/live")).status_code == 200
    nowhere.close()


@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_other_servers_names_of_ready(gateway: Any, path: str) -> None:
    del gateway.http.headers["authorization"]
    ready = await gateway.http.get(path)
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")
    assert (await gateway.http.head(path)).status_code == 200
    gateway.engine.die()
    assert (await gateway.http.get(path)).status_code == 503
    assert (await gateway.http.head(path)).status_code == 503
    gateway.engine.revive()


async def test_live_fails_for_an_unkillable_engine_but_not_for_a_restart(gateway: Any) -> None:
    gateway.engine.die()
    assert (await gateway.http.get("/health/live")).status_code == 200
    gateway.engine.is_live = False
    live = await gateway.http.get("/health/live")
    assert (live.status_code, live.json()) == (503, {"status": "not live"})
    gateway.engine.is_live = True
    gateway.engine.revive()
    assert (await gateway.http.get("/health/live")).json() == {"status": "live"}


async def test_last_output_of_an_engine_is_shown_only_to_operators(gateway: Any) -> None:
    services = gateway.services
    app = FastAPI()
    add_health(app, services.database, services.engine, tells_why=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as admin:
        assert "reason" not in (await admin.get("/health/ready")).json()
        gateway.engine.die()
        assert (await admin.get("/health/ready")).json()["reason"] == "killed by SIGKILL: last words"
    assert "reason" not in (await gateway.http.get("/health/ready")).json()


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_excluded_request_returns_400_and_costs_nothing(gateway: Any, stream: bool) -> None:
    gateway.limit("requests_per_minute", 5)
    gateway.engine.script = lambda add: Script(token_ids=(), error="request_excluded")
    response = await gateway.http.post("/v1/completions", json={"model": "base", "prompt": "a", "stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (400, "invalid_request_error", "request_excluded")
    [event] = gateway.usage()
    assert (event.status, event.prompt_tokens, event.completion_tokens) == ("failed", 0, 0)
    gateway.engine.script = lambda add: Script(token_ids=(300,))
    again = await gateway.http.post("/v1/completions", json={"model": "base", "prompt": "a"})
    assert again.headers["x-ratelimit-remaining-requests"] == "4"


async def test_operators_see_which_of_several_engines_is_ready(gateway: Any) -> None:
    services, engines = gateway.services, {"engine-0": ScriptedEngine(), "engine-1": ScriptedEngine()}
    app = FastAPI()
    add_health(app, services.database, services.engine, tells_why=True, engines=engines)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as admin:
        ready = {"status": "ready", "engine": True, "database": True}
        assert (await admin.get("/health/ready")).json() == {**ready, "engines": {"engine-0": True, "engine-1": True}}
        engines["engine-1"].die()
        one = await admin.get("/health/ready")
        assert (one.status_code, one.json()) == (
            200,
            {
                **ready,
                "engines": {"engine-0": True, "engine-1": False},
                "reason": "engine-1: killed by SIGKILL: last words",
            },
        )
