"""Requests to an alias that would be refused, which the alias's overflow answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from loramux.adapter_store.formats.files.file_names import PARSERS_FILE
from loramux.adapter_store.registry.aliases import AdapterAliases
from loramux.adapter_store.registry.records import Adapter
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.sharing import AdapterGrants
from loramux.migrations.database import Database
from loramux.platform.accounts.alias_overflows import MAX_STALE_S
from loramux.platform.accounts.tenants import TenantChanges
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.plan import Target
from loramux.platform.requests import request_life
from loramux.platform.requests.services import GatewaySettings
from loramux.platform.service_tiers import parse_objectives
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.engine.simulated_engine import Clock
from tests.platform.gateways import Gateway, open_gateway
from tests.platform.generation.test_first_token_gate import MAX_SEQUENCES, look, nothing_reserved, value
from tests.platform.ready_adapters import digest_of
from tests.platform.scripted_engine import Script
from tests.platform.test_service_tiers import CHAT, COMPLETIONS, HEADERS, MESSAGES, RESPONSES

pytestmark = pytest.mark.anyio

SURFACES = pytest.mark.parametrize(
    ("path", "body"), [CHAT, COMPLETIONS, RESPONSES, MESSAGES], ids=["chat", "completions", "responses", "messages"]
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def full(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, anyio_backend: str, clock: Clock
) -> AsyncIterator[Gateway]:
    """A gateway that refuses every request of the tiers `priority` and `default`. Its tenant's adapter `support`
    overflows to the base.
    """
    objectives = parse_objectives("priority=1s,default=10s,flex=none")
    settings = GatewaySettings(tier_objectives=objectives, logs_answers=True)
    async with open_gateway(accounts, tokenizer, threads, settings, clock=clock) as gateway:
        tiers = TenantChanges(max_service_tier="priority")
        gateway.services.callers.tenants.update(gateway.tenant.id, tiers, lambda _: None)
        overflow_to(gateway, "base")
        await look(gateway, 0, num_running=MAX_SEQUENCES)
        clock.now += 10
        await look(gateway, 10, num_running=MAX_SEQUENCES, num_waiting=30)
        yield gateway


def overflow_to(gateway: Gateway, model: str) -> None:
    adapter_id = gateway.add_adapter("acme", "support")
    AdapterAliases(gateway.database).set(adapter_id, "default", {1: 1}, overflow=model)


def support(gateway: Gateway) -> Adapter:
    found = AdapterRegistry(gateway.database).find_adapter(gateway.tenant.id, "support")
    assert found is not None
    return found


async def ask(gateway: Gateway, path: str, body: dict[str, Any], **fields: Any) -> httpx.Response:
    return await gateway.http.post(path, json={"model": "support", **body, **fields}, headers=HEADERS)


@pytest.mark.parametrize("is_streamed", [False, True])
@SURFACES
async def test_overflow_answers_in_the_last_tier_and_the_answer_names_it(
    full: Gateway, path: str, body: dict[str, Any], is_streamed: bool
) -> None:
    response = await ask(full, path, body, stream=is_streamed)
    assert response.status_code == 200, response.text
    assert response.headers["x-loramux-overflow-of"] == "support"
    assert response.headers["x-loramux-resolved-model"] == "base"
    assert "x-loramux-adapter" not in response.headers
    compact = response.text.replace(" ", "")
    assert '"model":"base"' in compact
    assert '"service_tier":"flex"' in compact
    assert "support" not in compact
    [add] = full.engine.adds
    assert (add.digest, add.service_tier) == (None, "flex")
    [event] = full.usage()
    assert (event.model, event.adapter_id, event.service_tier) == ("base", None, "flex")
    assert event.request_id == response.headers["x-request-id"]
    assert value(full, "loramux_overflows_total") == 1


async def test_overflow_answers_for_an_adapter_that_cannot_be_loaded(gateway: Gateway) -> None:
    overflow_to(gateway, "acme/small")
    gateway.add_adapter("acme", "small")
    broken = digest_of("acme/support@1")
    gateway.engine.script = lambda add: Script(
        token_ids=() if add.digest == broken else (5, 6), error="adapter_unavailable" if add.digest == broken else None
    )
    response = await ask(gateway, *CHAT)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == response.headers["x-loramux-adapter"] == "acme/small@1"
    assert response.json()["service_tier"] == "default", "the tier is not overloaded"
    await nothing_reserved(gateway)
    failed, answered = gateway.usage()
    assert (failed.model, failed.status, failed.completion_tokens) == ("acme/support@1", "model_failed", 0)
    assert (answered.model, answered.status) == ("acme/small@1", "completed")
    assert answered.request_id == response.headers["x-request-id"] != failed.request_id


async def test_overflow_answers_for_an_adapter_that_this_server_cannot_use(gateway: Gateway) -> None:
    files = {PARSERS_FILE: b'{"tool_call_parser": "of-an-extension"}'}
    adapter_id = gateway.add_adapter("acme", "support", files=files)
    response = await ask(gateway, *CHAT)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "adapter_unavailable")
    AdapterAliases(gateway.database).set(adapter_id, "default", {1: 1}, overflow="base")
    gateway.services.callers.overflows._read = None
    response = await ask(gateway, *CHAT)
    assert response.status_code == 200, response.text
    assert (response.json()["model"], response.headers["x-loramux-overflow-of"]) == ("base", "support")
    assert response.json()["service_tier"] == "default"
    [event] = gateway.usage()
    assert (event.model, event.status) == ("base", "completed")


async def test_request_that_has_begun_is_not_answered_and_charged_again(gateway: Gateway) -> None:
    overflow_to(gateway, "base")
    gateway.engine.script = lambda add: Script(token_ids=(5, 6), error="overloaded")
    response = await ask(gateway, *CHAT)
    assert response.status_code == 503
    await nothing_reserved(gateway)
    [event] = gateway.usage()
    assert (event.model, event.status) == ("acme/support@1", "failed")


async def test_overflow_that_cannot_answer_leaves_the_refusal(full: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(target: Target) -> None:
        raise InvalidRequest("the model is a classifier", code="wrong_task")

    monkeypatch.setattr(request_life, "check_generates", refuse)
    with capture_logs() as logs:
        response = await ask(full, *CHAT)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "overloaded"
    assert (full.engine.adds, full.usage()) == ([], [])
    [answered] = [entry for entry in logs if entry["event"] == "answered"]
    assert answered["model"] == "acme/support@1"


@pytest.mark.parametrize(
    "fields",
    [{"model": "support@1"}, {"model": "support:beta"}, {"model": "base"}, {"service_tier": "priority"}],
    ids=["version", "another alias", "base", "priority"],
)
async def test_other_requests_do_not_overflow(full: Gateway, fields: dict[str, str]) -> None:
    AdapterAliases(full.database).set(support(full).id, "beta", {1: 1})
    response = await ask(full, *CHAT, **fields)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "overloaded"
    assert (full.engine.adds, full.usage()) == ([], [])


async def test_caller_needs_the_right_to_call_both_models(full: Gateway) -> None:
    async def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        response = await full.http.post(CHAT[0], json={"model": "acme/support", **CHAT[1]}, headers=headers)
        return response.status_code

    assert await status(full.key_of("acme", "adapters")) == 503, "it may not call the base"
    stranger = full.key_of("globex")
    assert await status(stranger) == 404, "it may not call the adapter"
    # Once its own tenant is known, a request is refused before its model is looked up. The thread that clears the cache
    # of tenants would have it forgotten.
    full.services.callers.cache_invalidation.close()
    full.services.callers.cache_invalidation._thread.join(60)
    globex_base = {"authorization": f"Bearer {stranger}"}
    await full.http.post(CHAT[0], json={"model": "base", **CHAT[1]}, headers=globex_base)
    assert await status(stranger) == 503, "as for a model that does not exist"
    globex = full.services.callers.tenants.get("globex")
    assert globex is not None
    AdapterGrants(full.database).add(support(full), globex.id)
    assert await status(stranger) == 200
    assert [event.tenant_id for event in full.usage()] == [globex.id]


async def test_quota_holds_for_the_overflow(full: Gateway) -> None:
    full.limit("requests_per_minute", 1)
    assert [(await ask(full, *CHAT)).status_code for _ in range(2)] == [200, 429]
    assert len(full.usage()) == 1
    await nothing_reserved(full)


async def test_overflow_that_would_be_late_for_the_last_tier_is_refused(full: Gateway) -> None:
    full.services.run.gate._objectives["flex"] = 1.0
    response = await ask(full, *CHAT)
    assert response.status_code == 503
    assert "the service tier flex" in response.json()["error"]["message"]


async def test_change_of_the_overflow_is_heeded_within_seconds(full: Gateway, clock: Clock) -> None:
    assert (await ask(full, *CHAT)).status_code == 200
    AdapterAliases(full.database).set(support(full).id, "default", {1: 1}, overflow=None)
    assert (await ask(full, *CHAT)).status_code == 200
    clock.now += MAX_STALE_S
    assert (await ask(full, *CHAT)).status_code == 503


async def test_one_refusal_reads_the_overflows_and_others_do_not_wait(
    full: Gateway, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await ask(full, *CHAT)).status_code == 200
    overflows = full.services.callers.overflows
    is_reading, go_on, read_all = threading.Event(), threading.Event(), overflows._all

    def slow() -> Any:
        assert not is_reading.is_set(), "another refusal reads them"
        is_reading.set()
        assert go_on.wait(60)
        return read_all()

    monkeypatch.setattr(overflows, "_all", slow)
    clock.now += MAX_STALE_S
    first = asyncio.create_task(ask(full, *CHAT))
    while not is_reading.is_set():  # noqa: ASYNC110  another thread sets it
        await asyncio.sleep(0.001)
    assert (await ask(full, *CHAT)).status_code == 200
    go_on.set()
    assert (await first).status_code == 200
