from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy import select
from sqlalchemy.exc import OperationalError
from structlog.contextvars import merge_contextvars
from structlog.testing import capture_logs

from loramux.migrations import schema
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import Closing
from loramux.platform.generation import generation, maintenance, running_requests
from loramux.platform.ledger.events import Ledger
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

CHAT = {"model": "base", "messages": [{"role": "user", "content": "Hello"}]}


def stalling(after: int, **more: Any) -> Any:
    return lambda add: Script(token_ids=(300,) * 50, stall_after=after, **more)


async def settled(gateway: Any) -> Any:
    assert await gateway.services.run.requests.drain(60)
    [event] = gateway.usage()
    with gateway.database.read() as connection:
        assert connection.execute(select(schema.reservations)).all() == [], "a settled request is only in the ledger"
    return event


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_disconnected_client_pays_for_committed_tokens(gateway: Any, gateway_url: str, stream: bool) -> None:
    gateway.engine.script = stalling(3)
    headers = {"authorization": f"Bearer {gateway.key}"}
    shown = asyncio.Event()

    async def ask() -> None:
        async with (
            httpx.AsyncClient(base_url=gateway_url, headers=headers, timeout=30) as client,
            client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": stream}) as response,
        ):
            async for _ in response.aiter_lines():
                shown.set()

    asking = asyncio.create_task(ask())
    async with asyncio.timeout(30):
        await eventually_received(gateway, 3)
        if stream:
            await shown.wait()
        asking.cancel()
        await gateway_settles(gateway)
    event = await settled(gateway)
    assert (event.status, event.completion_tokens) == ("aborted", 3)
    assert event.prompt_tokens == len(gateway.engine.adds[0].prompt)
    assert discarded(gateway) == 0


def discarded(gateway: Any) -> float:
    value = gateway.services.metrics.registry.get_sample_value("loramux_tokens_total", {"kind": "discarded"})
    assert value is not None
    return float(value)


async def engine_is_idle(gateway: Any) -> None:
    """Wait until the engine's last report has been read, even if its request was settled before."""
    async with asyncio.timeout(30):
        while gateway.engine.num_running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def gateway_settles(gateway: Any) -> None:
    while not gateway.usage():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def test_a_stream_arrives_token_by_token(gateway: Any, gateway_url: str) -> None:
    gateway.engine.script = stalling(2)
    headers = {"authorization": f"Bearer {gateway.key}"}
    async with (
        httpx.AsyncClient(base_url=gateway_url, headers=headers, timeout=30) as client,
        client.stream("POST", "/v1/completions", json={"model": "base", "prompt": "a", "stream": True}) as response,
    ):
        lines = response.aiter_lines()
        # The engine has stalled. Tokens that have arrived must not wait for later ones.
        async with asyncio.timeout(30):
            received = [await anext(lines) for _ in range(3)]
        assert [bool(line) for line in received] == [True, False, True]
        gateway.engine.die()
        rest = [line async for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_unavailable"


async def test_unanswered_abort_does_not_delay_the_client(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "FINISHED_WAIT_S", 0.05)
    gateway.engine.script = stalling(4, ignores_abort=True, cached_tokens=1)
    stop = gateway.services.prompts.tokenizer.decode([300])
    body = {"model": "base", "prompt": "a", "stop": stop, "max_tokens": 200}
    async with asyncio.timeout(30):
        answer = (await gateway.http.post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1, "the engine said so at the start"
    gateway.engine.die()
    await engine_is_idle(gateway)


async def test_tokens_that_are_reported_after_the_settlement_are_counted(
    gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "FINISHED_WAIT_S", 0.05)
    gateway.engine.script = stalling(4, tokens_per_output=4, ignores_abort=True)
    stop = gateway.services.prompts.tokenizer.decode([300])
    body = {"model": "base", "prompt": "a", "stop": stop, "max_tokens": 200}
    answer = (await gateway.http.post("/v1/completions", json=body)).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert await gateway.services.run.requests.drain(60)
    assert discarded(gateway) == 0
    [sequence] = gateway.engine._running.values()
    sequence.end("abort")
    await engine_is_idle(gateway)
    assert discarded(gateway) == 3
    assert gateway.usage()[0].completion_tokens == 1


@pytest.mark.parametrize("received", [0, 4], ids=["in its first step", "later"])
async def test_abandoned_request_is_settled_after_a_long_step(
    gateway: Any, monkeypatch: pytest.MonkeyPatch, received: int
) -> None:
    monkeypatch.setattr(generation, "FINISHED_WAIT_S", 0.01)
    gateway.engine.script = stalling(received, abort_delay_s=0.2, cached_tokens=1)
    event = await abandoned(gateway, received)
    assert (event.status, event.completion_tokens) == ("aborted", received)
    assert event.prompt_tokens == len(gateway.engine.adds[0].prompt)
    # Only the engine can know this number.
    assert event.cached_tokens == 1


@pytest.mark.parametrize("received", [0, 4], ids=["in its first step", "later"])
async def test_abandoned_request_on_a_hung_engine_pays_for_received_tokens(
    gateway: Any, monkeypatch: pytest.MonkeyPatch, received: int
) -> None:
    monkeypatch.setattr(generation, "ABANDONED_WAIT_S", 0.05)
    gateway.limit("requests_per_minute", 5)
    gateway.engine.script = stalling(received, ignores_abort=True)
    event = await abandoned(gateway, received)
    assert (event.status, event.completion_tokens) == ("aborted", received)
    assert event.prompt_tokens == len(gateway.engine.adds[0].prompt)
    gateway.engine.script = lambda add: Script(token_ids=(300,))
    response = await gateway.http.post("/v1/completions", json={"model": "base", "prompt": "a"})
    assert response.headers["x-ratelimit-remaining-requests"] == "3"
    gateway.engine.die()
    await engine_is_idle(gateway)


async def abandoned(gateway: Any, received: int) -> Any:
    """Return the usage of a request whose client disconnected after `received` tokens."""
    asked = asyncio.create_task(gateway.http.post("/v1/completions", json={"model": "base", "prompt": "a"}))
    async with asyncio.timeout(30):
        while gateway.engine.num_running == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await eventually_received(gateway, received)
        [one] = gateway.services.run.requests._tasks.values()
        one.abandon()
        await asked
    return await settled(gateway)


async def eventually_received(gateway: Any, count: int) -> None:
    async with asyncio.timeout(30):
        while not any(one.num_received >= count for one in gateway.services.run.requests._tasks.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_missing_engine_returns_503_and_charges_nothing(gateway: Any) -> None:
    gateway.engine.die()
    with pytest.raises(openai.InternalServerError) as caught:
        await gateway.openai.chat.completions.create(**CHAT)
    assert caught.value.status_code == 503
    assert caught.value.code == "engine_unavailable"
    assert caught.value.response.headers["retry-after"] == "5"
    assert gateway.usage() == []
    gateway.engine.revive()
    await gateway.openai.chat.completions.create(**CHAT, max_tokens=1)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_request_that_never_ran_returns_503_and_costs_nothing(gateway: Any, stream: bool) -> None:
    gateway.limit("requests_per_minute", 5)
    gateway.engine.script = lambda add: Script(token_ids=(), error="engine_unavailable")
    with pytest.raises(openai.InternalServerError) as caught:
        await gateway.openai.chat.completions.create(**CHAT, stream=stream)
    assert caught.value.status_code == 503
    event = await settled(gateway)
    assert (event.status, event.prompt_tokens, event.completion_tokens) == ("failed", 0, 0)
    response = await gateway.http.post("/v1/completions", json={"model": "base", "prompt": "a"})
    assert response.headers["x-ratelimit-remaining-requests"] == "4"


async def test_engine_death_ends_a_stream_with_an_error_and_is_billed(gateway: Any) -> None:
    gateway.engine.script = stalling(5)
    asked = asyncio.create_task(gateway.http.post("/v1/chat/completions", json={**CHAT, "stream": True}))
    await eventually_received(gateway, 5)
    gateway.engine.die()
    response = await asked
    *_, last = response.text.removesuffix("\n\n").split("\n\n")
    assert json.loads(last.removeprefix("data: ")) == {
        "error": {
            "message": "the engine stopped; try again",
            "type": "server_error",
            "param": None,
            "code": "engine_unavailable",
        }
    }
    event = await settled(gateway)
    assert (event.status, event.completion_tokens) == ("failed", 5)
    assert event.prompt_tokens == len(gateway.engine.adds[0].prompt)


async def test_the_client_raises_for_an_error_inside_a_stream(gateway: Any) -> None:
    gateway.engine.script = lambda add: Script(token_ids=(300, 301), error="not_finite")
    stream = await gateway.openai.chat.completions.create(**CHAT, stream=True)
    with pytest.raises(openai.APIError, match="non-finite"):
        async for _ in stream:
            pass
    assert (await settled(gateway)).completion_tokens == 2


@pytest.mark.parametrize(
    ("code", "status", "shown"),
    [
        ("adapter_unavailable", 503, "adapter_unavailable"),
        ("adapter_unloaded", 503, "adapter_unavailable"),
        ("overloaded", 503, "overloaded"),
        ("prompt_too_long", 400, "context_length_exceeded"),
        ("request_too_large", 400, "request_too_large"),
        ("wrong_task", 400, "wrong_task"),
        ("not_finite", 500, "not_finite"),
        ("something_new", 500, "internal_error"),
    ],
)
async def test_engine_errors_map_to_http_statuses(gateway: Any, code: str, status: int, shown: str) -> None:
    gateway.engine.script = lambda add: Script(token_ids=(), error=code)
    response = await gateway.http.post("/v1/completions", json={"model": "base", "prompt": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (status, shown)
    assert ("retry-after" in response.headers) == (status == 503)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("adapter_unavailable", "model_failed"),
        ("adapter_quarantined", "model_failed"),
        ("not_finite", "model_failed"),
        ("something_new", "model_failed"),
        ("adapter_unloaded", "failed"),
        ("no_token_allowed", "failed"),
        ("grammar_failed", "failed"),
        ("request_excluded", "failed"),
        ("wrong_task", "failed"),
        ("overloaded", "failed"),
        ("replica_draining", "failed"),
    ],
)
async def test_ledger_tells_faults_of_the_model_from_others(gateway: Any, code: str, status: str) -> None:
    gateway.engine.script = lambda add: Script(token_ids=(300,), error=code)
    await gateway.http.post("/v1/completions", json={"model": "base", "prompt": "a"})
    assert (await settled(gateway)).status == status


async def test_failed_choice_ends_the_other_choices(gateway: Any) -> None:
    def script(add: Any) -> Script:
        return Script(token_ids=(300,), error="not_finite") if add.sequence_id.endswith("-1") else stalling(2)(add)

    gateway.engine.script = script
    response = await gateway.http.post("/v1/completions", json={"model": "base", "prompt": "a", "n": 2})
    assert response.status_code == 500
    event = await settled(gateway)
    assert event.status == "model_failed"
    assert 2 <= event.completion_tokens <= 3


async def test_a_draining_server_ends_running_requests_with_503(gateway: Any) -> None:
    gateway.engine.script = stalling(1)
    asked = asyncio.create_task(gateway.http.post("/v1/completions", json={"model": "base", "prompt": "a"}))
    await eventually_received(gateway, 1)
    assert not await gateway.services.run.requests.drain(0.01)
    gateway.engine.abort(gateway.engine.adds[0].sequence_id)
    response = await asked
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")


async def test_exhausted_quota_returns_429_with_its_name_and_headers(gateway_on_each: Any, clock: Any) -> None:
    gateway = gateway_on_each
    gateway.limit("requests_per_minute", 2)
    gateway.limit("tokens_per_minute", 100)
    raw = await gateway.openai.completions.with_raw_response.create(model="base", prompt=[5] * 10, max_tokens=10)
    assert raw.headers["x-ratelimit-limit-requests"] == "2"
    assert raw.headers["x-ratelimit-remaining-requests"] == "1"
    assert raw.headers["x-ratelimit-reset-requests"] == "30s"
    assert raw.headers["x-ratelimit-remaining-tokens"] == "80"
    with pytest.raises(openai.RateLimitError) as caught:
        await gateway.openai.completions.create(model="base", prompt=[5] * 10, max_tokens=80)
    assert caught.value.code == "rate_limit_exceeded"
    assert "tokens_per_minute" in str(caught.value)
    # 90 tokens are needed, 80 are left, and 100 per minute are added.
    assert caught.value.response.headers["retry-after"] == "6"
    with pytest.raises(openai.BadRequestError) as too_large:
        await gateway.openai.completions.create(model="base", prompt=[5] * 10, max_tokens=91)
    assert too_large.value.code == "request_too_large"
    clock.advance(6)
    await gateway.openai.completions.create(model="base", prompt=[5] * 10, max_tokens=80)
    assert [event.completion_tokens for event in gateway.usage()] == [10, 80]
    text = gateway.services.metrics.render().decode()
    assert 'loramux_quota_refusals_total{metric="tokens_per_minute",mode="hard"} 2.0' in text


async def test_concurrency_limit_counts_only_running_requests(gateway: Any) -> None:
    gateway.limit("concurrent_requests", 1)
    gateway.engine.script = stalling(1)
    asked = asyncio.create_task(gateway.http.post("/v1/completions", json={"model": "base", "prompt": "a"}))
    await eventually_received(gateway, 1)
    with pytest.raises(openai.RateLimitError):
        await gateway.openai.completions.create(model="base", prompt="a")
    other = gateway.openai.with_options(api_key=gateway.key_of("other"))
    gateway.engine.script = lambda add: Script(token_ids=(300,))
    await other.completions.create(model="base", prompt="a")
    gateway.engine.abort(gateway.engine.adds[0].sequence_id)
    await asked
    await gateway.openai.completions.create(model="base", prompt="a")


async def test_the_usage_of_a_mixed_load_adds_up(gateway_on_each: Any) -> None:
    gateway = gateway_on_each
    gateway.add_adapter("acme", "support")
    gateway.limit("tokens_per_minute", 10_000)
    answers = await asyncio.gather(
        *(
            gateway.openai.completions.create(model=model, prompt=[5] * (i + 1), max_tokens=i + 1)
            for i in range(12)
            for model in ("base", "support")
        )
    )
    events = gateway.usage()
    assert len(events) == 24
    assert sum(event.prompt_tokens for event in events) == sum(answer.usage.prompt_tokens for answer in answers) == 156
    assert sum(event.completion_tokens for event in events) == 156
    with gateway.database.read() as connection:
        counter = connection.execute(select(schema.quota_counters)).one()
    assert (counter.level, counter.reserved) == ((10_000 - 312) * 60_000_000, 0)


def fail_settlements(gateway: Any, monkeypatch: pytest.MonkeyPatch, failures: int, *, is_answer_lost: bool) -> None:
    """Make settlement commits fail a few times, either before they take effect or by losing the answer."""
    admission = gateway.services.run.commit._admission
    commit, left = admission.commit, [failures]

    def failing(operations: Any) -> Any:
        is_failing = left[0] > 0 and any(isinstance(operation, Closing) for operation in operations)
        left[0] -= is_failing
        if is_failing and not is_answer_lost:
            raise OperationalError("INSERT", {}, Exception("disk full"))
        outcomes = commit(operations)
        if is_failing:
            raise OperationalError("COMMIT", {}, Exception("connection reset"))
        return outcomes

    monkeypatch.setattr(admission, "commit", failing)


async def tended_until_settled(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maintenance, "TEND_INTERVAL_S", 0.01)
    maintaining = asyncio.create_task(gateway.services.run.maintenance.run())
    assert await gateway.services.run.requests.drain(60)
    maintaining.cancel()
    await asyncio.wait({maintaining})


@pytest.mark.parametrize("failures", [1, 3, 9], ids=["once", "thrice", "nine times"])
async def test_failed_settlement_is_retried_and_the_answer_succeeds(
    gateway: Any, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    fail_settlements(gateway, monkeypatch, failures, is_answer_lost=False)
    answer = await gateway.openai.completions.create(model="base", prompt="a", max_tokens=2)
    assert answer.usage.completion_tokens == 2
    await tended_until_settled(gateway, monkeypatch)
    assert [event.status for event in gateway.usage()] == ["completed"]
    assert 'loramux_tokens_total{kind="completion"} 2.0' in gateway.services.metrics.render().decode()


async def test_settling_a_recovered_request_charges_the_difference(gateway_on_each: Any, clock: Any) -> None:
    gateway = gateway_on_each
    gateway.engine.script = stalling(7)
    asked = asyncio.create_task(gateway.http.post("/v1/completions", json={"model": "base", "prompt": "a"}))
    await eventually_received(gateway, 3)
    await gateway.services.run.maintenance.checkpoint()
    noted = checkpoint_of(gateway)
    await eventually_received(gateway, 7)
    clock.advance(31)
    assert await gateway.services.call(gateway.services.run.maintenance._admission.recover_expired) == 1
    [guessed] = gateway.usage()
    assert (guessed.status, guessed.completion_tokens) == ("recovered", noted)
    gateway.engine.abort(gateway.engine.adds[0].sequence_id)
    await asked
    [event] = gateway.usage()
    assert event.completion_tokens == 7
    [row] = Ledger(gateway.database).report(None, 0, 2**61)
    assert (row.requests, row.prompt_tokens, row.completion_tokens) == (1, event.prompt_tokens, 7)
    [by_status] = Ledger(gateway.database).report(None, 0, 2**61, group_by=("status", "tenant"))
    assert (by_status.status, by_status.requests, by_status.completion_tokens) == ("recovered", 1, 7)
    assert 'loramux_tokens_total{kind="completion"} 7.0' in gateway.services.metrics.render().decode()


async def test_settlement_in_memory_corrects_another_gateways_recovery(
    gateway_on_each: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = gateway_on_each
    gateway.limit("tokens_per_minute", 10_000)
    gateway.engine.script = stalling(7)
    asked = asyncio.create_task(gateway.http.post("/v1/completions", json={"model": "base", "prompt": "a"}))
    await eventually_received(gateway, 3)
    await gateway.services.run.maintenance.checkpoint()
    noted = checkpoint_of(gateway)
    await eventually_received(gateway, 7)
    another = Admission(gateway.database)
    with monkeypatch.context() as patched:
        fail_settlements(gateway, patched, 1000, is_answer_lost=False)
        gateway.engine.abort(gateway.engine.adds[0].sequence_id)
        await asked
        assert gateway.services.run.settler.num_held == 1
        assert not gateway.services.run.maintenance._may_recover()
        clock.advance(31)
        assert another.recover_expired() == 1
        [guessed] = gateway.usage()
        assert (guessed.status, guessed.completion_tokens) == ("recovered", noted)
    await tended_until_settled(gateway, monkeypatch)
    [event] = gateway.usage()
    assert event.completion_tokens == 7
    with gateway.database.read() as connection:
        [adjustment] = connection.execute(select(schema.usage_adjustments)).all()
        counter = connection.execute(select(schema.quota_counters)).one()
    assert adjustment.completion_tokens == 7 - noted
    assert (counter.reserved, counter.level) == (0, (10_000 - event.prompt_tokens - 7) * 60_000_000)


async def test_settlement_with_a_lost_answer_counts_once(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_settlements(gateway, monkeypatch, 1, is_answer_lost=True)
    await gateway.openai.completions.create(model="base", prompt="a", max_tokens=2)
    await tended_until_settled(gateway, monkeypatch)
    assert [event.completion_tokens for event in gateway.usage()] == [2]
    assert 'loramux_tokens_total{kind="completion"} 2.0' in gateway.services.metrics.render().decode()


async def test_unreachable_database_returns_503(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(operations: Any) -> None:
        raise OperationalError("BEGIN", {}, Exception("connection refused"))

    with monkeypatch.context() as patched:
        patched.setattr(gateway.services.run.commit._admission, "commit", away)
        response = await gateway.http.post("/v1/completions", json={"model": "base", "prompt": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "quota_unavailable")
    assert response.headers["retry-after"] == "5"
    assert gateway.engine.adds == []
    # If the reservation had been made after all, it would be released now.
    await tended_until_settled(gateway, monkeypatch)
    assert gateway.usage() == []


async def test_lost_reservation_of_a_refused_request_is_released(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_requests, "RESERVE_WAIT_S", 0.05)
    admission, is_refused = gateway.services.run.commit._admission, threading.Event()
    commit = admission.commit

    def lost(operations: Any) -> None:
        commit(operations)
        is_refused.wait(30)
        raise OperationalError("COMMIT", {}, Exception("connection reset"))

    with monkeypatch.context() as patched:
        patched.setattr(admission, "commit", lost)
        response = await gateway.http.post("/v1/completions", json={"model": "base", "prompt": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "quota_unavailable")
        is_refused.set()
        async with asyncio.timeout(30):
            while gateway.services.run.settler.num_held == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    await tended_until_settled(gateway, monkeypatch)
    assert (await settled(gateway)).completion_tokens == 0


async def test_reservation_of_a_client_that_left_is_released(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    admission, has_left = gateway.services.run.commit._admission, threading.Event()
    commit, has_begun = admission.commit, asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(operations: Any) -> Any:
        loop.call_soon_threadsafe(has_begun.set)
        has_left.wait(30)
        return commit(operations)

    monkeypatch.setattr(admission, "commit", slow)
    asking = asyncio.create_task(gateway.http.post("/v1/completions", json={"model": "base", "prompt": "a"}))
    await has_begun.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    has_left.set()
    assert (await settled(gateway)).completion_tokens == 0
    assert gateway.engine.adds == []


async def test_unexpected_error_returns_500_with_the_request_id(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(operations: Any) -> None:
        raise ZeroDivisionError("a secret detail")

    monkeypatch.setattr(gateway.services.run.commit._admission, "commit", broken)
    with capture_logs(processors=[merge_contextvars]) as logged:
        response = await gateway.http.post("/v1/completions", json={"model": "base", "prompt": "a"})
    [named] = [entry["request_id"] for entry in logged if "request_id" in entry]
    assert named == response.headers["x-request-id"]
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert "secret" not in response.text
    assert response.headers["x-request-id"].startswith("req_")


async def test_checkpoints_keep_a_long_request_from_being_recovered(gateway_on_each: Any, clock: Any) -> None:
    gateway = gateway_on_each
    gateway.engine.script = stalling(7)
    asked = asyncio.create_task(gateway.http.post("/v1/completions", json={"model": "base", "prompt": "a"}))
    await eventually_received(gateway, 7)
    clock.advance(29)
    maintaining = asyncio.create_task(gateway.services.run.maintenance.run())
    async with asyncio.timeout(30):
        while checkpoint_of(gateway) != 7:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    maintaining.cancel()
    await asyncio.wait({maintaining})
    clock.advance(29)
    assert await gateway.services.call(gateway.services.run.maintenance._admission.recover_expired) == 0
    gateway.engine.abort(gateway.engine.adds[0].sequence_id)
    await asked
    assert [event.completion_tokens for event in gateway.usage()] == [7]


def checkpoint_of(gateway: Any) -> int:
    with gateway.database.read() as connection:
        return int(connection.execute(select(schema.reservations.c.checkpoint_tokens)).scalar_one())
