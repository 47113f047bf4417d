from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loramux.adapter_store.registry.digest_owners import DigestOwner
from loramux.adapter_store.tiers.tier_figures import Held, TierFigures
from loramux.admin.serving.app import create_admin_app
from loramux.engine.protocol.messages import Load, Pin, ResidentAdapter, Stats, StatsRequest
from loramux.platform.admission.records import LoadCharge
from loramux.platform.telemetry.routing_metrics import FRESH_S, ResidentNames, render_routing
from tests.admin.admin_side import AdminSide
from tests.admin.rest.tenants_and_keys import bearer, new_key
from tests.platform.cluster.test_replica_report import stats
from tests.platform.ready_adapters import add_ready_adapter

pytestmark = pytest.mark.anyio

TOKEN = "a-scrape-token-of-some-length"


def stranger(admin_side: Any, **changes: object) -> httpx.AsyncClient:
    app = create_admin_app(replace(admin_side.services, **changes))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


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
        pytest.param(None, True, {"x-forwarded-for": "198.51.100.7"}, 401, id="through a proxy"),
        pytest.param(None, True, {"x-forwarded-proto": "https"}, 401, id="through a proxy that ends TLS"),
        pytest.param(None, True, {"forwarded": "for=198.51.100.7"}, 401, id="through a proxy of RFC 7239"),
        pytest.param(None, True, {"via": "1.1 proxy"}, 401, id="through a proxy of RFC 9110"),
        pytest.param(None, True, {"x-real-ip": "198.51.100.7"}, 401, id="through nginx"),
        pytest.param(None, True, {"host": "lora.example.com"}, 401, id="by a proxy's host name"),
        pytest.param(None, True, {"host": "[::1"}, 401, id="by an invalid host"),
        pytest.param(None, True, {"host": "127.0.0.1:8001"}, 200, id="by address"),
        pytest.param(None, True, {"host": "[::1]:8001"}, 200, id="by IPv6 address"),
        pytest.param(TOKEN, True, {"authorization": f"Bearer {TOKEN}", "via": "1.1 proxy"}, 200, id="proxy with token"),
    ],
)
async def test_metrics_without_token_are_local_only(
    admin_side: Any, token: str | None, is_loopback: bool, headers: dict[str, Any], status: int
) -> None:
    async with stranger(admin_side, metrics_token=token, is_loopback=is_loopback) as http:
        response = await http.get("/metrics", headers=headers)
        assert response.status_code == status
        assert ("loramux_running_requests" in response.text) == (status == 200)
        assert ("set metrics_token" in response.text) == (token is None and status == 401)


@pytest.mark.parametrize("root_path", ["", "/ops"])
async def test_scrapes_are_not_admin_calls(admin_side: AdminSide, root_path: str) -> None:
    transport = httpx.ASGITransport(create_admin_app(admin_side.services, root_path))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for _ in range(2):
            scraped = await http.get("/metrics")
    assert scraped.status_code == 200
    assert "loramux_admin_requests_total{" not in scraped.text
    assert "loramux_admin_request_seconds_count 0.0" in scraped.text


async def test_adapter_loading_metrics_need_a_responding_engine(admin_side: Any) -> None:
    figures = TierFigures(held=lambda: {"host": Held(4096, 3)})
    figures.count_lookup("disk", True)
    figures.count_lookup("disk", False)
    figures.count_stage("disk", "read", 4096, 0.5)
    figures.count_end("loaded")
    stats = await admin_side.engine.call(StatsRequest(), 1.0)
    admin_side.engine.call = lambda message, timeout_s: answer(
        msgspec.structs.replace(stats, loading=figures.snapshot())
    )
    async with stranger(admin_side) as http:
        text = (await http.get("/metrics")).text
        samples = {one for one in text.splitlines() if re.match(r"loramux_adapter_(?!template_)", one)}
        assert {"loramux_engine_up 1.0", 'loramux_engine_pages{owner="free"} 64.0'} <= set(text.splitlines())
        assert samples >= {
            'loramux_adapter_lookups_total{result="hit",tier="disk"} 1.0',
            'loramux_adapter_lookups_total{result="miss",tier="disk"} 1.0',
            'loramux_adapter_lookups_total{result="hit",tier="host"} 0.0',
            'loramux_adapter_tier_bytes{tier="host"} 4096.0',
            'loramux_adapter_tier_evictions_total{tier="host"} 3.0',
            'loramux_adapter_stages_total{stage="read",tier="disk"} 1.0',
            'loramux_adapter_stage_bytes_total{stage="read",tier="disk"} 4096.0',
            'loramux_adapter_stage_seconds_total{stage="read",tier="disk"} 0.5',
            'loramux_adapter_stages_total{stage="copy",tier="pool"} 0.0',
            'loramux_adapter_loads_total{outcome="loaded"} 1.0',
            "loramux_adapter_files_set_aside_total 0.0",
        }
        assert len(samples) == 6 + 2 + 2 + 3 * 8 + 3 + 1, "the series do not depend on the adapters"
        assert 'loramux_engine_info{device="cpu",dtype="float32",weights="float"} 1.0' in text.splitlines()
        parsed = list(text_string_to_metric_families(text))
        assert len({family.name for family in parsed}) == len(parsed)
        del admin_side.engine.call
        admin_side.engine.die()
        response = await http.get("/metrics")
        assert response.status_code == 200
        assert not re.search("loramux_adapter_(?!template_)", response.text)
        assert "loramux_engine_up 0.0" in response.text.splitlines()
        assert "loramux_running_requests" in response.text


async def test_routers_find_the_load_and_the_adapters_in_the_pool(admin_side: Any) -> None:
    database = admin_side.services.database
    owner = admin_side.services.accounts.tenants.create("acme")
    add_ready_adapter(database, owner.id, "support", ["a" * 64, "b" * 64])
    add_ready_adapter(database, owner.id, "absent", ["c" * 64])
    await admin_side.engine.call(Load(digest="b" * 64), 1.0)
    # No version has this digest any more.
    await admin_side.engine.call(Load(digest="d" * 64), 1.0)
    async with stranger(admin_side, metrics_token=TOKEN) as http:
        assert (await http.get("/metrics/routing")).status_code == 401
        headers = {"authorization": f"Bearer {TOKEN}"}
        text = (await http.get("/metrics/routing", headers=headers)).text
        admin_side.engine.die()
        assert (await http.get("/metrics/routing", headers=headers)).status_code == 503
    samples = {one.name: one for family in text_string_to_metric_families(text) for one in family.samples}
    adapters = samples["vllm:lora_requests_info"]
    assert adapters.labels["running_lora_adapters"] == "acme/support,acme/support@2"
    assert int(adapters.labels["max_lora"]) > 0
    assert adapters.value > 1_700_000_000
    assert samples["vllm:num_requests_running"].labels == {"model_name": "the-base"}
    assert (samples["vllm:num_requests_running"].value, samples["vllm:num_requests_waiting"].value) == (0, 0)
    assert samples["vllm:kv_cache_usage_perc"].value == 0, "idle adapters can be evicted"
    assert samples["vllm:cache_config_info"].labels == {"block_size": "16", "num_gpu_blocks": "64"}


@pytest.mark.parametrize(
    ("adapter", "share"),
    [({}, 0.0), ({"is_pinned": True}, 0.9375), ({"num_users": 1}, 0.9375)],
    ids=["idle", "pinned", "in use"],
)
def test_pages_that_can_be_evicted_are_not_in_use_for_routers(adapter: dict[str, Any], share: float) -> None:
    resident = ResidentAdapter(**{"digest": "a", "slot": 0, "num_pages": 60, "num_users": 0, **adapter})
    found = msgspec.structs.replace(stats(num_free_pages=4), num_pages=64, adapters=(resident,))
    assert f'vllm:kv_cache_usage_perc{{model_name="b"}} {share}' in render_routing(found, None, "b", ()).decode()


def test_names_of_resident_adapters_are_read_again_after_a_while() -> None:
    asked: list[list[str]] = []
    now_s = 0.0

    def named(name: str) -> DigestOwner:
        return DigestOwner(tenant_id="", tenant_slug="t", adapter_id="", adapter_name=name, version=1)

    def owners(digests: Sequence[str]) -> dict[str, list[DigestOwner]]:
        asked.append(list(digests))
        return {
            one: [DigestOwner(tenant_id="", tenant_slug="t", adapter_id="", adapter_name=one, version=1)]
            for one in digests
        }

    names = ResidentNames(owners, lambda: now_s)
    assert names.of(["a", "b"]) == ["t/a", "t/a@1", "t/b", "t/b@1"]
    assert names.of(["b", "c"]) == ["t/b", "t/b@1", "t/c", "t/c@1"]
    now_s = FRESH_S
    assert names.of(["c"]) == ["t/c", "t/c@1"]
    assert asked == [["a", "b"], ["c"], ["c"]]


async def answer(stats: Stats) -> Stats:
    return stats


async def test_engine_stats_and_resident_adapters_are_returned(http: httpx.AsyncClient, admin_side: Any) -> None:
    await admin_side.engine.call(Load(digest="d" * 64), 1.0)
    engine = (await http.get("/admin/v1/engine")).json()
    assert (engine["device"], engine["num_pages"], engine["num_adapter_pages"]) == ("cpu", 64, 1)
    assert engine["host_pages"]["restored_tokens"] == engine["disk_pages"]["read_tokens"] == 0
    assert {one["tier"] for one in engine["loading"]["tiers"]} == {"host", "disk", "blobs"}
    assert not {"call_id", "adapters"} & engine.keys()
    (adapter,) = (await http.get("/admin/v1/residency")).json()["data"]
    assert (adapter["digest"], adapter["num_pages"], adapter["num_users"]) == ("d" * 64, 1, 0)


async def test_tenant_sees_only_weights_that_it_has_used_itself(http: httpx.AsyncClient, admin_side: Any) -> None:
    services = admin_side.services
    database, tenants = services.database, services.accounts.tenants
    acme, globex = tenants.create("acme"), tenants.create("globex")
    zebra = add_ready_adapter(database, acme.id, "zebra", ["a" * 64])
    ant = add_ready_adapter(database, acme.id, "ant", ["b" * 64])
    add_ready_adapter(database, acme.id, "copied", ["c" * 64])
    add_ready_adapter(database, globex.id, "theirs", ["c" * 64])
    add_ready_adapter(database, acme.id, "unused", ["d" * 64])
    own_key = await new_key(http, "acme", "tenant:admin")
    for digest in ("b", "a", "c", "d"):
        await admin_side.engine.call(Load(digest=digest * 64), 1.0)
    for adapter_id, digest in ((ant, "b"), (zebra, "a")):
        charge = LoadCharge(tenant_id=acme.id, api_key_id=own_key["id"], adapter_id=adapter_id)
        await services.engine.loads.load(digest * 64, charge, 1.0)
    # As if another tenant had pinned the weights.
    await admin_side.engine.call(Pin(digest="a" * 64, is_pinned=True), 1.0)
    headers = bearer(own_key["secret"])

    async def listed(**sent: Any) -> list[tuple[str, bool]]:
        found = (await http.get("/admin/v1/residency", **sent)).json()
        assert not found["has_more"]
        return [(one["digest"][0], one["is_pinned"]) for one in found["data"]]

    assert await listed(headers=headers) == [("b", False), ("a", False)]
    assert sorted(await listed()) == [("a", True), ("b", False), ("c", False), ("d", False)]


async def test_dead_engine_returns_503(http: httpx.AsyncClient, admin_side: Any) -> None:
    admin_side.engine.die()
    for path in ("engine", "residency"):
        response = await http.get(f"/admin/v1/{path}")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
        assert int(response.headers["retry-after"]) >= 1
    assert (await http.get("/admin/v1/tenants")).status_code == 200
