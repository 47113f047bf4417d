from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from loramux.admin.serving.app import create_admin_app
from tests.admin.admin_side import ADMIN_KEY, AdminSide
from tests.admin.fleet import BASE_ID, OWN, PEER, SILENT, STRANGER, ScriptedFleet
from tests.platform.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio


@pytest.fixture
async def operator(admin_side: AdminSide) -> AsyncIterator[httpx.AsyncClient]:
    """An operator's client of a server with a fleet. The peer's engine holds one adapter."""
    peer = ScriptedEngine()
    peer.resident["ab" * 32] = 1
    fleet = ScriptedFleet(admin_side.engine, peer)
    services = admin_side.services
    app = create_admin_app(replace(services, engine=replace(services.engine, fleet=fleet)))
    transport = httpx.ASGITransport(app)
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://admin/admin/v1", headers=headers) as client:
        yield client


async def test_replicas_are_listed_with_their_load_or_the_reason_of_their_refusal(operator: httpx.AsyncClient) -> None:
    listed = (await operator.get("/replicas")).json()["data"]
    assert [(one["id"], one["state"], one["is_own"]) for one in listed] == [
        (OWN, "serving", True),
        (PEER, "draining", False),
        (SILENT, "unreachable", False),
        (STRANGER, "refused", False),
    ]
    assert [one["base_id"] for one in listed] == [BASE_ID, BASE_ID, BASE_ID, None]
    assert listed[1]["num_running"] == 5
    assert listed[1]["num_free_pages"] == 40
    assert listed[3]["reason"] == "it serves another base"
    assert listed[3]["capacity"] is None


async def test_residency_of_another_server_is_its_engines(operator: httpx.AsyncClient) -> None:
    assert (await operator.get("/residency")).json()["data"] == []
    assert (await operator.get("/residency", params={"replica": OWN})).json()["data"] == []
    (held,) = (await operator.get("/residency", params={"replica": PEER})).json()["data"]
    assert held["digest"] == "ab" * 32


@pytest.mark.parametrize(
    ("replica", "status", "code"),
    [
        pytest.param("rep_nobody", 404, "not_found", id="unknown"),
        pytest.param(STRANGER, 404, "not_found", id="refused"),
        pytest.param(SILENT, 503, "engine_unavailable", id="silent"),
        pytest.param("x" * 41, 400, "invalid_value", id="too long"),
    ],
)
async def test_a_server_that_cannot_be_asked_is_an_error(
    operator: httpx.AsyncClient, replica: str, status: int, code: str
) -> None:
    answer = await operator.get("/residency", params={"replica": replica})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_a_server_without_peers_lists_none_and_knows_only_its_own_engine(http: httpx.AsyncClient) -> None:
    assert (await http.get("/admin/v1/replicas")).json()["data"] == []
    assert (await http.get("/admin/v1/residency", params={"replica": OWN})).status_code == 404
