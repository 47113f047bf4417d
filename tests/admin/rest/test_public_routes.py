from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from starlette.applications import Starlette
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from loramux.admin.serving.app import create_admin_app
from tests.admin.admin_side import AdminSide
from tests.admin.app_client import client_of
from tests.admin.openai_side import open_services, whole_app

pytestmark = pytest.mark.anyio

HEALTH = {"/health/live", "/health/ready", "/health", "/ping"}
Call = tuple[str, str]


def calls_of(app: Starlette, prefix: str = "") -> Iterator[Call]:
    """Yield the method and path of every route, including mounted apps. Path parameters are replaced by `1`."""
    for route in iter_route_contexts(app.routes):
        path = prefix + re.sub(r"\{[^}]*\}", "1", getattr(route, "path", ""))
        methods: Iterable[str] = getattr(route, "methods", None) or ()
        for method in sorted(set(methods) - {"HEAD"}):
            yield method, path
    for route in app.routes:
        if isinstance(route, Mount) and isinstance(route.app, Starlette):
            yield from calls_of(route.app, prefix + route.path)


async def statuses_of(app: ASGIApp, calls: Iterable[Call]) -> dict[Call, httpx.Response]:
    async with client_of(app) as stranger:
        # Send an invalid body, which would get a 400 if the server read it before authenticating the caller.
        return {(method, path): await stranger.request(method, path, content=b"{") for method, path in calls}


async def test_openai_routes_except_health_require_a_key(console_side: AdminSide, demo_base: Path) -> None:
    with open_services(console_side.services.database, demo_base) as services:
        app = whole_app(services, console_side)
        calls = set(calls_of(app))
        answers = await statuses_of(app, calls)
    assert {("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models/1")} <= calls
    assert ("GET", "/openapi.json") in calls
    for (method, path), answer in answers.items():
        if path in HEALTH:
            assert answer.status_code in (200, 503)
            continue
        assert answer.status_code == 401, (method, path)
        error = answer.json()["error"]
        assert error.get("code", error["type"]) in ("missing_api_key", "authentication_error"), (method, path)
        assert answer.headers["www-authenticate"] == "Bearer"


async def test_admin_routes_except_public_ones_require_a_key(console_side: AdminSide) -> None:
    # If other machines can reach the listener, scraping metrics also requires a token.
    app = create_admin_app(replace(console_side.services, is_loopback=False))
    calls = {call for call in calls_of(app) if not call[1].startswith("/console") and call[1] != "/"}
    assert len(calls) > 60
    for (method, path), answer in (await statuses_of(app, calls)).items():
        if path in HEALTH:
            assert answer.status_code in (200, 503)
            continue
        assert answer.status_code == 401, (method, path)


async def test_console_shows_only_the_login_page_without_a_session(console_side: AdminSide) -> None:
    app = create_admin_app(console_side.services)
    calls = {call for call in calls_of(app) if call[1].startswith("/console/")}
    assert len(calls) > 40
    opened = set()
    for (method, path), answer in (await statuses_of(app, calls)).items():
        if answer.is_success:
            opened.add((method, path))
        elif answer.is_redirect:
            assert answer.headers["location"].startswith("/console/login"), (method, path)
        else:
            assert answer.status_code in (400, 401, 403), (method, path, answer.status_code)
    assert opened == {("GET", "/console/login")}


def test_only_static_files_are_mounted_in_the_console(console_side: AdminSide) -> None:
    """The console mounts only the public static files, because the tests above do not check routes inside mounts."""
    app = create_admin_app(console_side.services)
    assert [route.path for route in app.routes if isinstance(route, Mount)] == ["/console"]
    console = next(route.app for route in app.routes if isinstance(route, Mount))
    assert isinstance(console, Starlette)
    assert [route.path for route in console.routes if not isinstance(route, Route)] == ["/static"]  # type: ignore[attr-defined]
