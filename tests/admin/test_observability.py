"""Health, metrics and the engine's state on the admin listener."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from loramux.admin.app import create_admin_app

pytestmark = pytest.mark.anyio

TOKEN = "a-scrape-token-of-some-length"


def stranger(admin_side: Any, **changes: object) -> httpx.AsyncClient:
    """A client without a key, of an app with other services."""
    app = create_admin_app(replace(admin_side.services, **changes))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin")


async def test_health_needs_no_key_and_follows_the_engine(admin_side: Any) -> None:
    async with stranger(admin_side) as http:
        assert (await http.get("/health/live")).status_code == 200
        assert (await http.get("/health/ready")).status_code == 200
        admin_side.engine.die()
        assert (await http.get("/health/live")).status_code == 200
        assert (await http.get("/health/ready")).status_code == 503


@pytest.mark.parametrize(
    ("token", "is_loopback", "headers", "status"),
    [
        pytest.param(None, True, {}, 200, id="loopback"),
        pytest.param(None, False, {}, 401, id="network without token"),
        pytest.param(TOKEN, True, {}, 401, id="loopback with token, none given"),
        pytest.param(TOKEN, False, {"authorization": f"Bearer {TOKEN}"}, 200, id="the token"),
        pytest.param(TOKEN, False, {"authorization": f"Bearer {TOKEN}x"}, 401, id="another token"),
        pytest.param(TOKEN, False, {"authorization": "Bearer é".encode()}, 401, id="not ASCII"),
    ],
)
async def test_metrics_are_open_to_this_machine_only(
    admin_side: Any, token: str | None, is_loopback: bool, headers: dict[str, Any], status: int
) -> None:
    async with stranger(admin_side, metrics_token=token, is_loopback=is_loopback) as http:
        response = await http.get("/metrics", headers=headers)
        assert response.status_code == status
        assert ("loramux_running_requests" in response.text) == (status == 200)


async def test_the_engine_and_what_it_holds(http: httpx.AsyncClient, admin_side: Any) -> None:
    await admin_side.engine.load("d" * 64, 1.0)
    engine = (await http.get("/admin/v1/engine")).json()
    assert (engine["device"], engine["num_pages"], engine["num_adapter_pages"]) == ("cpu", 64, 1)
    (adapter,) = (await http.get("/admin/v1/residency")).json()["data"]
    assert (adapter["digest"], adapter["num_pages"], adapter["num_users"]) == ("d" * 64, 1, 0)


async def test_a_dead_engine_is_503(http: httpx.AsyncClient, admin_side: Any) -> None:
    admin_side.engine.die()
    for path in ("engine", "residency"):
        response = await http.get(f"/admin/v1/{path}")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
        assert int(response.headers["retry-after"]) >= 1
    assert (await http.get("/admin/v1/tenants")).status_code == 200
