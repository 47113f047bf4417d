"""Requests that would miss the objective of their service tier, through the gateway and a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select

from loramux.engine.protocol.messages import ResidentAdapter, TierLoad
from loramux.engine.protocol.service_tiers import INPUT_PRICE, OUTPUT_PRICE
from loramux.migrations.database import Database
from loramux.migrations.schema import reservations
from loramux.platform.accounts.tenants import TenantChanges
from loramux.platform.admission.records import Reservation
from loramux.platform.generation.plan import Plan
from loramux.platform.generation.running_requests import RunningRequests
from loramux.platform.quotas.overview import QuotaCaller, QuotaOverview
from loramux.platform.requests import request_life
from loramux.platform.requests.request_life import REFUSED_STALE_US
from loramux.platform.requests.services import GatewaySettings
from loramux.platform.responses_api import background
from loramux.platform.service_tiers import parse_objectives
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.engine.simulated_engine import Clock
from tests.platform.gateways import Gateway, open_gateway
from tests.platform.ready_adapters import digest_of
from tests.platform.scripted_engine import Script
from tests.platform.test_service_tiers import CHAT, COMPLETIONS, HEADERS, MESSAGES, RESPONSES

pytestmark = pytest.mark.anyio

OBJECTIVES = "priority=5s,default=10s,flex=10s"
MAX_SEQUENCES = 2


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def gated(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, anyio_backend: str, clock: Clock
) -> AsyncIterator[Gateway]:
    """A gateway with objectives, whose engine has two slots. While they are taken, a sequence ends each second."""
    settings = GatewaySettings(tier_objectives=parse_objectives(OBJECTIVES))
    async with open_gateway(accounts, tokenizer, threads, settings, clock=clock) as gateway:
        tiers = TenantChanges(max_service_tier="priority")
        gateway.services.callers.tenants.update(gateway.tenant.id, tiers, lambda _: None)
        await look(gateway, 0, num_running=MAX_SEQUENCES)
        clock.now += 10
        await look(gateway, 10, num_running=MAX_SEQUENCES)
        yield gateway


async def look(gateway: Gateway, num_ended: int = 10, adapters: tuple[ResidentAdapter, ...] = (), **load: int) -> None:
    """Let the engine report a load of requests of the tier `default` of other gateways."""
    gateway.engine.figures = {
        "service_tiers": (TierLoad(), TierLoad(**load), TierLoad(), TierLoad()),
        "max_sequences": MAX_SEQUENCES,
        "num_running": load.get("num_running", 0),
        "num_ended": num_ended,
        "adapters": adapters,
    }
    await gateway.services.run.gate.look()


async def status(gateway: Gateway, path: str, body: dict[str, Any], **fields: Any) -> int:
    response = await gateway.http.post(path, json={"model": "base", **body, **fields}, headers=HEADERS)
    return response.status_code


def value(gateway: Gateway, name: str, **labels: str) -> float:
    return gateway.services.metrics.registry.get_sample_value(name, labels) or 0.0


async def nothing_reserved(gateway: Gateway) -> None:
    assert await gateway.services.run.requests.drain(60)
    with gateway.database.read() as connection:
        assert connection.execute(select(reservations.c.id)).all() == []


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [CHAT, COMPLETIONS, RESPONSES, MESSAGES], ids=["chat", "completions", "responses", "messages"]
)
async def test_late_first_token_is_refused_at_once_and_for_free(
    gated: Gateway, path: str, body: dict[str, Any], is_streamed: bool
) -> None:
    gated.limit("tokens_per_day", 10**6)
    await look(gated, num_running=MAX_SEQUENCES, num_waiting=30)
    response = await gated.http.post(path, json={"model": "base", **body, "stream": is_streamed}, headers=HEADERS)
    assert response.status_code in (503, 529), response.text
    error = response.json()["error"]
    assert "expected in 31 s" in error["message"]
    assert error.get("code", "overloaded") == "overloaded"
    assert response.headers["retry-after"] == "24", "when the forecast is 7 of the 10 seconds"
    assert (gated.engine.adds, gated.usage()) == ([], [])
    await nothing_reserved(gated)
    [limit] = QuotaOverview(gated.database).effective(QuotaCaller(tenant_id=gated.tenant.id))
    assert (limit.used, limit.reserved) == (0, 0)
    assert value(gated, "loramux_overload_refusals_total", tier="default", status="503") == 1


async def test_late_background_response_is_refused_before_it_is_planned(
    gated: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "planned", None)
    await look(gated, num_running=MAX_SEQUENCES, num_waiting=30)
    assert await status(gated, *RESPONSES, background=True, store=True) == 503


async def test_known_tenant_is_refused_without_the_database(gated: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    # After a second, its thread would clear the cache, because the tenant is new.
    gated.services.callers.cache_invalidation.close()
    gated.services.callers.cache_invalidation._thread.join(60)
    await look(gated, num_running=MAX_SEQUENCES, num_waiting=30)
    assert await status(gated, *CHAT) == 503
    monkeypatch.setattr(request_life, "resolve", None)
    shares = gated.services.callers.tenants._shares
    cached = shares[gated.tenant.id]
    shares[gated.tenant.id] = replace(cached, read_us=cached.read_us - REFUSED_STALE_US // 2)
    assert await status(gated, *CHAT) == 503
    assert value(gated, "loramux_overload_refusals_total", tier="default", status="503") == 2


async def test_long_prompt_is_refused_where_a_short_one_is_not(gated: Gateway, clock: Clock) -> None:
    await look(gated, num_waiting=1)
    clock.now += 10
    gated.engine.figures |= {"prefill_tokens": 10, "prefill_s": 10.0}
    await gated.services.run.gate.look()
    assert await status(gated, *COMPLETIONS, prompt=[5] * 5) == 200
    assert await status(gated, *COMPLETIONS, prompt=[5] * 8) == 429
    assert await status(gated, *COMPLETIONS, prompt=[[5] * 5, [5] * 8], n=20) == 200, "one prompt has a token in time"
    await nothing_reserved(gated)
    gated.engine.figures["service_tiers"] = (TierLoad(),) * 4
    await gated.services.run.gate.look()
    assert await status(gated, *COMPLETIONS, prompt=[5] * 8) == 200, "on an idle engine, it shows how long it takes"
    assert {len(add.prompt) for add in gated.engine.adds} == {5, 8}
    await nothing_reserved(gated)


async def test_running_embedding_does_not_wait_for_a_first_token(gated: Gateway, clock: Clock) -> None:
    await look(gated)
    clock.now += 10
    gated.engine.figures |= {"prefill_tokens": 10, "prefill_s": 10.0}
    await gated.services.run.gate.look()
    gated.engine.script = lambda add: Script(token_ids=(), stall_after=0)
    embedding = asyncio.create_task(gated.http.post("/v1/embeddings", json={"model": "base", "input": "Hi"}))
    while not gated.engine.adds:  # noqa: ASYNC110 - no event exists
        await asyncio.sleep(0)
    gated.engine.script = lambda add: Script(token_ids=(5, 6))
    assert await status(gated, *COMPLETIONS, prompt=[5] * 8) == 200, "it is the next to run"
    gated.engine.die()
    assert (await embedding).status_code == 503


async def test_cached_prompt_is_not_charged_to_the_share(gated: Gateway) -> None:
    await look(gated)
    gated.engine.script = lambda add: Script(token_ids=(5, 6), cached_tokens=8)
    assert await status(gated, *COMPLETIONS, prompt=[5] * 10) == 200
    await nothing_reserved(gated)
    [asking] = gated.services.run.gate._forecast.queue._shares.values()
    [event] = gated.usage()
    assert asking.served == INPUT_PRICE * 2 + OUTPUT_PRICE * event.completion_tokens


async def test_better_tiers_are_served_while_worse_ones_are_refused(gated: Gateway) -> None:
    await look(gated, num_running=MAX_SEQUENCES, num_waiting=8)
    assert await status(gated, *CHAT, service_tier="priority") == 200
    assert await status(gated, *CHAT, service_tier="default") == 503
    assert await status(gated, *CHAT, service_tier="flex") == 503
    assert [add.service_tier for add in gated.engine.adds] == ["priority"]


async def test_tenant_that_floods_gets_429_and_others_are_served(gated: Gateway) -> None:
    await look(gated)
    gated.engine.script = lambda add: Script(token_ids=(5,), stall_after=0)
    flood = [asyncio.create_task(status(gated, *CHAT)) for _ in range(50)]
    while sum(task.done() for task in flood) + len(gated.engine.adds) < 50:  # noqa: ASYNC110 - no event exists
        await asyncio.sleep(0)
    refused = [task.result() for task in flood if task.done()]
    assert set(refused) == {429}
    # Two slots are free, and one more sequence begins each second.
    assert 50 - len(refused) == MAX_SEQUENCES + 7
    other = {"authorization": f"Bearer {gated.key_of('globex')}"}
    gated.engine.script = lambda add: Script(token_ids=(5, 6))
    polite = await gated.http.post(CHAT[0], json={"model": "base", **CHAT[1]}, headers=other)
    assert polite.status_code == 200
    gated.engine.die()
    await asyncio.gather(*flood)
    gated.engine.revive()
    await nothing_reserved(gated)
    assert await status(gated, *CHAT) == 200, "requests that failed no longer wait"


async def test_goodput_counts_first_tokens_within_the_objective(gated: Gateway, clock: Clock) -> None:
    await look(gated)

    def slow(seconds: float) -> Any:
        def script(add: Any) -> Script:
            clock.now += seconds
            return Script(token_ids=(5, 6))

        return script

    for seconds in (1, 9.5, 10.5):
        gated.engine.script = slow(seconds)
        assert await status(gated, *CHAT) == 200
    gated.engine.script = slow(5.5)
    assert await status(gated, *CHAT, service_tier="priority") == 200
    found = {
        (tier, outcome): value(gated, "loramux_first_tokens_total", tier=tier, outcome=outcome)
        for tier in ("priority", "default")
        for outcome in ("in_time", "late")
    }
    assert found == {
        ("priority", "in_time"): 0,
        ("priority", "late"): 1,
        ("default", "in_time"): 2,
        ("default", "late"): 1,
    }


@pytest.mark.parametrize(("is_loaded", "expected"), [(False, 200), (True, 503)])
async def test_waits_for_adapters_delay_the_forecast_only_of_requests_that_wait_for_one(
    gated: Gateway, clock: Clock, is_loaded: bool, expected: int
) -> None:
    gated.add_adapter("acme", "support")
    digest = digest_of("acme/support@1")
    resident = ResidentAdapter(digest=digest, slot=0, num_pages=1, num_users=0)
    await look(gated, adapters=(resident,) if is_loaded else ())

    def slow(add: Any) -> Script:
        clock.now += 1
        return Script(token_ids=(5, 6))

    gated.engine.script = slow
    for _ in range(3):
        response = await gated.http.post(CHAT[0], json={"model": "acme/support", **CHAT[1]}, headers=HEADERS)
        assert response.status_code == 200, response.text
    assert {add.digest for add in gated.engine.adds} == {digest}
    # With six requests before it, the forecast of a request is as long as it can be.
    await look(gated, num_running=MAX_SEQUENCES, num_waiting=6)
    assert await status(gated, *CHAT) == expected
    await nothing_reserved(gated)
    await look(gated, num_running=MAX_SEQUENCES, num_waiting=6)
    response = await gated.http.post(CHAT[0], json={"model": "acme/support", **CHAT[1]}, headers=HEADERS)
    assert response.status_code == 503


async def test_a_slow_reservation_does_not_delay_the_forecast(
    gated: Gateway, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await look(gated)
    reserve = RunningRequests.reserve

    async def slow(self: RunningRequests, plan: Plan) -> Reservation:
        reservation = await reserve(self, plan)
        clock.now += 1
        return reservation

    monkeypatch.setattr(RunningRequests, "reserve", slow)
    for _ in range(3):
        assert await status(gated, *CHAT) == 200
    monkeypatch.undo()
    await look(gated, num_running=MAX_SEQUENCES, num_waiting=6)
    assert await status(gated, *CHAT) == 200


async def test_request_that_ends_without_a_first_token_is_late(gated: Gateway, clock: Clock) -> None:
    await look(gated)

    def failing(add: Any) -> Script:
        clock.now += 10.5
        return Script(token_ids=(), stall_after=0)

    gated.engine.script = failing
    call = asyncio.create_task(status(gated, *CHAT))
    while not gated.engine.adds:  # noqa: ASYNC110 - no event exists
        await asyncio.sleep(0)
    gated.engine.die()
    assert await call == 503
    assert value(gated, "loramux_first_tokens_total", tier="default", outcome="late") == 1


async def test_request_without_quota_is_no_longer_awaited(gated: Gateway) -> None:
    await look(gated, num_running=MAX_SEQUENCES)
    gated.limit("requests_per_minute", 1)
    assert await status(gated, *CHAT) == 200
    for _ in range(20):
        assert await status(gated, *CHAT) == 429
    assert await status(gated, *CHAT) == 429
    assert value(gated, "loramux_overload_refusals_total", tier="default", status="429") == 0


async def test_tier_without_an_objective_is_never_refused(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, clock: Clock
) -> None:
    settings = GatewaySettings(tier_objectives=parse_objectives("default=10s,flex=none"))
    async with open_gateway(accounts, tokenizer, threads, settings, clock=clock) as gateway:
        await look(gateway, 0, num_running=MAX_SEQUENCES)
        clock.now += 10
        await look(gateway, num_running=MAX_SEQUENCES, num_waiting=1000)
        assert await status(gateway, *CHAT) == 503
        assert await status(gateway, *CHAT, service_tier="flex") == 200
        embedded = await gateway.http.post("/v1/embeddings", json={"model": "base", "input": "Hi"})
        assert embedded.status_code == 200, "it has no first token"


async def test_nothing_is_refused_by_default(gateway: Gateway) -> None:
    gateway.engine.figures = {"service_tiers": (TierLoad(num_waiting=10**6),) * 4, "max_sequences": 1}
    await gateway.services.run.gate.follow()
    assert await status(gateway, *CHAT) == 200


@pytest.mark.parametrize(
    ("text", "objectives"),
    [
        ("", {}),
        ("priority=1s,default=5s,flex=none", {"priority": 1.0, "default": 5.0}),
        (" auto=500ms , ", {"default": 0.5}),
        ("flex=0.25s", {"flex": 0.25}),
    ],
)
def test_objectives(text: str, objectives: dict[str, float]) -> None:
    assert parse_objectives(text) == objectives


@pytest.mark.parametrize(
    "text",
    [
        "priority",
        "gold=1s",
        "default=1",
        "default=0s",
        "default=-1s",
        "default=4000s",
        "default=1s,auto=2s",
        "flex=nans",
    ],
)
def test_wrong_objectives_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"service tiers|must be a time"):
        parse_objectives(text)
