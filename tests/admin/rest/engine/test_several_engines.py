from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loramux.admin.serving.app import create_admin_app
from loramux.platform.base_draw import BaseDraw
from loramux.platform.cluster.cluster_fleet import ClusterFleet
from loramux.platform.replicas.data_parallel import DataParallelEngines
from loramux.platform.replicas.engine_group import EngineGroup
from tests.admin.admin_side import ADMIN_KEY, MODEL_SOURCE, AdminSide
from tests.platform.cluster.calls_here import CallsHere
from tests.platform.replicas.lab import ChosenRouter
from tests.platform.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.anyio

TROUBLE = "killed by SIGKILL: last words"


@pytest.fixture
def pair() -> tuple[ScriptedEngine, ScriptedEngine]:
    """The engines of the server. The second has an adapter."""
    first, second = ScriptedEngine(), ScriptedEngine()
    second.resident["ab" * 32] = 3
    return first, second


@pytest.fixture
async def operator(
    admin_side: AdminSide, pair: tuple[ScriptedEngine, ScriptedEngine]
) -> AsyncIterator[httpx.AsyncClient]:
    several = DataParallelEngines({"engine-0": pair[0], "engine-1": pair[1]}, ChosenRouter)
    await several.beat()
    services = admin_side.services
    check = replace(services.engine.self_check, engine=several.engine, engines=several.engines)
    engine = replace(services.engine, client=several.engine, fleet=several, self_check=check)
    app = create_admin_app(replace(services, engine=engine, metrics_token=None, is_loopback=True))
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost", headers=headers
    ) as client:
        yield client


async def data(operator: httpx.AsyncClient, path: str, **params: str) -> Any:
    answer = await operator.get(f"/admin/v1{path}", params=params)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_each_engine_is_listed_and_shows_its_own_adapters(operator: httpx.AsyncClient) -> None:
    listed = (await data(operator, "/replicas"))["data"]
    assert [(one["id"], one["is_own"], one["address"], one["num_adapters"]) for one in listed] == [
        ("engine-0", True, "cpu", 0),
        ("engine-1", True, "cpu", 1),
    ]
    everything = await data(operator, "/residency")
    assert [one["digest"] for one in everything["data"]] == ["ab" * 32]
    assert everything["pages"]["total"] == 128
    assert (await data(operator, "/residency", replica="engine-0"))["data"] == []
    [held] = (await data(operator, "/residency", replica="engine-1"))["data"]
    assert held["num_pages"] == 3
    assert (await data(operator, "/engine"))["num_adapter_pages"] == 3
    assert (await data(operator, "/engine", replica="engine-0"))["num_adapter_pages"] == 0
    document = (await operator.get("/openapi.json")).json()
    for path in ("/admin/v1/engine", "/admin/v1/residency"):
        assert (await operator.get(path, params={"replica": "engine-2"})).status_code == 404
        assert "404" in document["paths"][path]["get"]["responses"]


async def test_metrics_of_each_engine_have_its_name(
    operator: httpx.AsyncClient, pair: tuple[ScriptedEngine, ScriptedEngine]
) -> None:
    text = (await operator.get("/metrics")).text
    lines = text.splitlines()
    assert 'loramux_engine_up{engine="engine-0"} 1.0' in lines
    assert 'loramux_engine_pages{engine="engine-1",owner="adapter"} 3.0' in lines
    assert 'loramux_engine_steps_total{engine="engine-0"} 0.0' in lines
    assert 'loramux_engine_step_seconds_bucket{engine="engine-0",le="+Inf"} 0.0' in lines
    assert 'loramux_engine_info{device="cpu",dtype="float32",engine="engine-0",weights="float"} 1.0' in lines
    parsed = list(text_string_to_metric_families(text))
    assert len({family.name for family in parsed}) == len(parsed), "each family is described once"
    pair[0].die()
    lines = (await operator.get("/metrics")).text.splitlines()
    assert 'loramux_engine_up{engine="engine-0"} 0.0' in lines
    assert 'loramux_engine_steps_total{engine="engine-1"} 0.0' in lines
    assert not any(line.startswith('loramux_engine_steps_total{engine="engine-0"}') for line in lines)


async def test_health_and_findings_name_the_engine_that_is_not_ready(
    operator: httpx.AsyncClient, pair: tuple[ScriptedEngine, ScriptedEngine]
) -> None:
    async def findings() -> list[tuple[str, str]]:
        found = (await data(operator, "/server/findings"))["data"]
        return [(one["grade"], one["message"]) for one in found if one["check"] == "engine"]

    assert await findings() == [
        ("ok", f"engine-{number} serves the-base, which is {MODEL_SOURCE}") for number in range(2)
    ]
    pair[1].die()
    assert (await findings())[1] == ("warning", f"engine-1 is not ready: {TROUBLE}")
    health = await operator.get("/health/ready")
    assert (health.status_code, health.json()["engines"]) == (200, {"engine-0": True, "engine-1": False})
    assert health.json()["reason"] == f"engine-1: {TROUBLE}"
    pair[0].die()
    assert [grade for grade, _ in await findings()] == ["failed", "failed"]
    assert (await operator.get("/health/ready")).status_code == 503


async def test_replicas_of_a_cluster_are_measured_one_by_one(
    admin_side: AdminSide, pair: tuple[ScriptedEngine, ScriptedEngine], tmp_path: Path
) -> None:
    group, calls = EngineGroup("no replica is ready"), CallsHere(tmp_path)
    metrics = admin_side.services.metrics.replicas
    fleet = ClusterFleet(calls, group, ChosenRouter, BaseDraw("", None), metrics)
    engine = replace(admin_side.services.engine, client=fleet.engine, fleet=fleet)
    app = create_admin_app(replace(admin_side.services, engine=engine, metrics_token=None, is_loopback=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        assert "loramux_engine_up 0.0" in (await client.get("/metrics")).text.splitlines()
        for shown in ({"a": pair[0], "b": pair[1]}, {"b": pair[1]}):
            group.show(shown, None)
            lines = (await client.get("/metrics")).text.splitlines()
            steps = [line for line in lines if line.startswith("loramux_engine_steps_total")]
            assert steps == [f'loramux_engine_steps_total{{engine="{name}"}} 0.0' for name in shown]
    calls.context.destroy(linger=0)
