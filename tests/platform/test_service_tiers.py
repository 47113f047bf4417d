"""The field `service_tier`, on every surface, and the tiers that tenants and keys may use."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from sqlalchemy import insert

from loramux.engine.protocol.service_tiers import SERVICE_TIERS
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import prices
from loramux.platform.accounts.keys import KeyChanges
from loramux.platform.accounts.tenants import TenantChanges
from loramux.platform.ledger.prices import Price
from loramux.platform.quotas.overview import QuotaCaller, QuotaOverview
from loramux.platform.service_tiers import BATCH_RIGHTS, TierRights
from tests.platform.gateways import Gateway

pytestmark = pytest.mark.anyio

SAID = [{"role": "user", "content": "Hi"}]
CHAT: tuple[str, dict[str, Any]] = ("/v1/chat/completions", {"messages": SAID, "max_tokens": 2})
COMPLETIONS: tuple[str, dict[str, Any]] = ("/v1/completions", {"prompt": "Hi", "max_tokens": 2})
RESPONSES: tuple[str, dict[str, Any]] = ("/v1/responses", {"input": "Hi", "max_output_tokens": 2})
MESSAGES: tuple[str, dict[str, Any]] = ("/v1/messages", {"messages": SAID, "max_tokens": 2})
HEADERS = {"anthropic-version": "2023-06-01"}
OPENAI = pytest.mark.parametrize(
    ("path", "body"), [CHAT, COMPLETIONS, RESPONSES], ids=["chat", "completions", "responses"]
)


def allow(gateway: Gateway, highest: str, default: str = "default") -> None:
    changes = TenantChanges(max_service_tier=highest, default_service_tier=default)
    gateway.services.callers.tenants.update(gateway.tenant.id, changes, lambda _: None)


def metric_lines(gateway: Gateway) -> list[str]:
    return gateway.services.metrics.render().decode().splitlines()


async def sent(gateway: Gateway, path: str, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    response = await gateway.http.post(path, json={"model": "base", **body, **more}, headers=HEADERS)
    assert response.status_code == 200, response.text
    document: dict[str, Any] = response.json()
    return document


@pytest.mark.parametrize(
    ("asked", "tier"),
    [
        (None, "default"),
        ("auto", "default"),
        ("default", "default"),
        ("scale", "default"),
        ("fast", "priority"),
        ("ultrafast", "priority"),
        ("flex", "flex"),
        ("priority", "priority"),
    ],
)
@OPENAI
async def test_answer_engine_and_ledger_have_the_tier(
    gateway: Gateway, path: str, body: dict[str, Any], asked: str | None, tier: str
) -> None:
    allow(gateway, "priority")
    document = await sent(gateway, path, body, service_tier=asked)
    assert document["service_tier"] == tier
    assert gateway.engine.adds[-1].service_tier == tier
    assert [event.service_tier for event in gateway.usage()] == [tier]
    assert f'tier="{tier}"' in next(line for line in metric_lines(gateway) if "first_token_seconds_count{" in line)


@pytest.mark.parametrize(
    ("asked", "default", "shown"),
    [
        (None, "default", "standard"),
        ("auto", "priority", "priority"),
        ("auto", "flex", "flex"),
        ("standard_only", "priority", "standard"),
    ],
)
async def test_messages_have_anthropics_names(gateway: Gateway, asked: str | None, default: str, shown: str) -> None:
    allow(gateway, "priority", default)
    document = await sent(gateway, *MESSAGES, service_tier=asked)
    assert document["usage"]["service_tier"] == shown
    assert gateway.engine.adds[-1].service_tier == ("default" if shown == "standard" else shown)


@OPENAI
async def test_a_tier_that_is_not_allowed_becomes_the_best_allowed_one(
    gateway: Gateway, path: str, body: dict[str, Any]
) -> None:
    assert (await sent(gateway, path, body, service_tier="priority"))["service_tier"] == "default"
    allow(gateway, "flex")
    assert (await sent(gateway, path, body, service_tier="priority"))["service_tier"] == "flex"
    assert [add.service_tier for add in gateway.engine.adds] == ["default", "flex"]


@pytest.mark.parametrize("asked", ["best", "", "PRIORITY", 1, ["flex"], {"tier": "flex"}, "flex\x00", "standard_only"])
@OPENAI
async def test_other_values_are_refused(gateway: Gateway, path: str, body: dict[str, Any], asked: Any) -> None:
    response = await gateway.http.post(path, json={"model": "base", **body, "service_tier": asked})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "service_tier"
    assert gateway.engine.adds == []


@pytest.mark.parametrize("asked", ["flex", "priority", "", 1])
async def test_other_values_are_refused_by_messages(gateway: Gateway, asked: Any) -> None:
    path, body = MESSAGES
    sent = {"model": "base", **body, "service_tier": asked}
    response = await gateway.http.post(path, json=sent, headers=HEADERS)
    assert response.status_code == 400
    assert "service_tier" in response.json()["error"]["message"]


async def test_streams_say_the_tier(gateway: Gateway) -> None:
    chunks = [
        chunk
        async for chunk in await gateway.openai.chat.completions.create(
            model="base", messages=SAID, max_tokens=3, stream=True, service_tier="flex"
        )
    ]
    assert {chunk.service_tier for chunk in chunks} == {"flex"}


async def test_a_key_has_tiers_of_its_own_within_those_of_its_tenant(gateway: Gateway) -> None:
    allow(gateway, "priority")
    keys = gateway.services.callers.api_keys
    made = keys.create(gateway.tenant.id, "batch job", max_service_tier="default", default_service_tier="flex")
    headers = {"authorization": f"Bearer {made.secret}"}

    async def tier(**fields: Any) -> str:
        body = {"model": "base", **CHAT[1], **fields}
        return str((await gateway.http.post(CHAT[0], json=body, headers=headers)).json()["service_tier"])

    assert [await tier(), await tier(service_tier="priority")] == ["flex", "default"]
    keys.update(made.key.id, KeyChanges(max_service_tier="inherit", default_service_tier="inherit"), lambda _: None)
    assert [await tier(), await tier(service_tier="priority")] == ["default", "priority"]
    allow(gateway, "default")
    keys.update(made.key.id, KeyChanges(max_service_tier="priority"), lambda _: None)
    assert await tier(service_tier="priority") == "default"


@pytest.mark.parametrize(
    ("rights", "asked", "tier"),
    [
        (TierRights("priority", "flex").for_key(None, None), None, "flex"),
        (TierRights("default", "default").for_key("priority", "priority"), None, "default"),
        (TierRights("priority", "priority").for_key("flex", None), "default", "flex"),
        (BATCH_RIGHTS, "flex", "default"),
        (BATCH_RIGHTS, "priority", "default"),
    ],
)
def test_rights(rights: TierRights, asked: str | None, tier: str) -> None:
    assert rights.tier(asked) == tier


async def test_bills_are_exact(gateway_on_each: Gateway) -> None:
    """On SQLite and PostgreSQL, each tier pays its part of the price, in the ledger and from a budget in money."""
    gateway = gateway_on_each
    allow(gateway, "priority")
    listed = Price(
        id=new_id("prc"),
        tenant_id=None,
        scope="all",
        currency="USD",
        prompt_nanos=3_000_001,
        cached_nanos=1,
        completion_nanos=7_000_003,
        flex_percent=33,
        priority_percent=250,
        effective_us=0,
        created_us=0,
    )
    with gateway.database.write() as connection:
        connection.execute(insert(prices).values(asdict(listed)))
    gateway.limit("cost_per_day", 10**9)
    for tier in SERVICE_TIERS:
        await sent(gateway, *CHAT, service_tier=tier)
    per_million = {"priority": (7_500_003, 17_500_008), "default": (3_000_001, 7_000_003), "flex": (990_001, 2_310_001)}
    events = {event.service_tier: event for event in gateway.usage()}
    for tier, (prompt, completion) in per_million.items():
        event = events[tier]
        assert event.price_id == listed.id
        total = event.prompt_tokens * prompt + event.completion_tokens * completion
        assert event.cost_nanos == -(-total // 1_000_000)
    [limit] = QuotaOverview(gateway.database).effective(QuotaCaller(tenant_id=gateway.tenant.id))
    assert (limit.used, limit.reserved) == (sum(event.cost_nanos for event in events.values()), 0)
