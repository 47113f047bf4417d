"""`/v1/batches`, with OpenAI's client."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from openai import BadRequestError, ConflictError, NotFoundError, RateLimitError
from sqlalchemy import insert

from loramux.adapter_store.errors import ClaimLost, RequestsRunning
from loramux.adapter_store.ingest.purge_rows import PurgeRows
from loramux.engine.protocol.messages import Add
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import prices
from loramux.platform.accounts.principals import Principal
from loramux.platform.accounts.tenants import TenantChanges, Tenants
from loramux.platform.batches import batch_rows, batch_run, line_run
from loramux.platform.batches.batch_claims import BatchClaim, StoredAnswer, WaitingLine
from loramux.platform.batches.batch_rows import BatchState
from loramux.platform.batches.batch_run import MAX_PLANNED, BatchRun
from loramux.platform.batches.line_run import LineRuns, PlannedLine, ReadLine
from loramux.platform.batches.room import MAX_ENTERING, Room, RoomLimits
from loramux.platform.batches.tenant_files import Owner
from loramux.platform.errors import ApiError
from loramux.platform.generation import engine_failures
from loramux.platform.generation.generation import Generation
from loramux.platform.ledger.prices import Price
from loramux.platform.quotas.policies import QuotaPolicies
from loramux.platform.requests.request_life import settle
from loramux.platform.requests.services import GatewaySettings
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.batches.batch_lab import CHAT, BatchLab, content_of, line
from tests.platform.gateways import open_gateway
from tests.platform.ready_adapters import digest_of
from tests.platform.scripted_engine import Script
from tests.platform.storing import KEY, allow

pytestmark = pytest.mark.anyio


@pytest.fixture
async def lab(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, anyio_backend: str
) -> AsyncIterator[BatchLab]:
    async with open_gateway(accounts, tokenizer, threads) as gateway:
        yield BatchLab(gateway)


def places_of(digests: list[str | None], digest: str | None) -> list[int]:
    return [place for place, one in enumerate(digests) if one == digest]


def ids(lines: list[dict[str, Any]]) -> list[str]:
    return [one["custom_id"] for one in lines]


class StartedLine:
    plan = SimpleNamespace(num_sequences=1)


async def test_a_line_enters_as_soon_as_another_has_started(lab: BatchLab) -> None:
    """Without a wait for the next look at the engine."""
    room = Room(lab.gateway.services.engine, RoomLimits(capacity=lambda: 100, look_s=3600))
    first, *others = await room.enter(MAX_ENTERING + 1)
    assert len(others) == MAX_ENTERING - 1
    entering = asyncio.create_task(room.enter(2))
    await asyncio.sleep(0)
    assert not entering.done()
    room.add(cast("Generation", StartedLine()))
    first.leave()
    async with asyncio.timeout(20):
        assert len(await entering) == 1
    # A line leaves once.
    first.leave()
    assert room._entering.issuperset(others)


async def test_lines_that_end_together_enter_together(lab: BatchLab) -> None:
    room = Room(lab.gateway.services.engine, RoomLimits(capacity=lambda: 3, look_s=3600, gather_s=0.01))
    started = [cast("Generation", StartedLine()) for _ in range(3)]
    for entry, one in zip(await room.enter(9), started, strict=True):
        room.add(one)
        entry.leave()
    entering = asyncio.create_task(room.enter(9))
    await asyncio.sleep(0)
    for one in started[:2]:
        room.remove(one)
    async with asyncio.timeout(20):
        assert len(await entering) == 2


async def test_lines_let_requests_without_a_token_go_first(lab: BatchLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.platform.batches.room.YIELD_S", 3600.0)
    is_awaited = True
    room = Room(lab.gateway.services.engine, RoomLimits(look_s=0.001, gather_s=0.0), lambda: is_awaited)
    entering = asyncio.create_task(room.enter(1))
    await asyncio.sleep(0.1)
    assert not entering.done()
    is_awaited = False
    async with asyncio.timeout(20):
        await entering
    # They do not wait forever.
    monkeypatch.setattr("loramux.platform.batches.room.YIELD_S", 0.0)
    is_awaited = True
    async with asyncio.timeout(20):
        await room.enter(1)


async def test_pooled_requests_are_awaited_until_their_first_state(lab: BatchLab) -> None:
    """They get no token, and lines must not wait for one."""
    requests, awaited = lab.gateway.services.run.requests, list[int]()

    def script(add: Any) -> Script:
        awaited.append(requests.num_awaited)
        return Script(token_ids=())

    # The scripted engine answers the first prompt before it gets the second.
    lab.gateway.engine.script = script
    await lab.gateway.openai.embeddings.create(model="base", input=[[4], [5]])
    assert awaited == [1, 0]


async def test_long_answers_keep_their_room_until_they_are_stored(
    lab: BatchLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would otherwise pile up in memory."""
    lab.limits = replace(lab.limits, capacity=lambda: 1)
    num_unstored, record = [], BatchClaim.record

    def counting(self: BatchClaim, batch_id: str, answers: Sequence[tuple[WaitingLine, StoredAnswer]]) -> BatchState:
        num_unstored.append(len(answers))
        return record(self, batch_id, answers)

    monkeypatch.setattr(BatchClaim, "record", counting)
    url = "/v1/embeddings"
    bodies = [{"model": "base", "input": [[number]]} for number in range(4, 8)]
    lines = [{"custom_id": str(n), "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies)]
    batch = await lab.create(lines, endpoint=url)
    async with lab.running():
        await lab.finished(batch)
    assert num_unstored == [1] * 4


async def test_slow_line_delays_only_the_lines_behind_it(lab: BatchLab, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, num_planned, has_started, most = LineRuns.plan, 0, asyncio.Event(), 0
    keys, owner = lab.gateway.services.callers.api_keys, Owner(lab.gateway.tenant.id, "", is_limited=False)

    async def slow(self: LineRuns, one: ReadLine, caller: Principal) -> PlannedLine | ApiError:
        nonlocal num_planned, most
        num_planned += 1
        most = max(most, len(self._room._entering))
        if num_planned == 2:
            async with asyncio.timeout(20):
                await has_started.wait()
            for key in keys.list(lab.gateway.tenant.id, 10).data:
                keys.revoke(key.id)
        return await plan(self, one, caller)

    def script(add: Any) -> Script:
        has_started.set()
        return Script(token_ids=(5, 6))

    lab.gateway.engine.script = script
    monkeypatch.setattr(LineRuns, "plan", slow)
    lab.limits = replace(lab.limits, capacity=lambda: 100)
    batch = await lab.create([line(f"{number}") for number in range(30)])
    async with lab.running(), asyncio.timeout(40):
        while not (found := lab.gateway.kept.batches.get(owner, batch.id)).is_finished:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    # The key is looked up again for each line.
    assert (found.num_completed, found.num_failed) == (2, 28)
    assert most <= MAX_PLANNED


async def test_every_failure_of_a_line_is_read() -> None:
    async def fail() -> None:
        raise ClaimLost("no")

    loop, reported = asyncio.get_running_loop(), list[dict[str, Any]]()
    handler = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    try:
        run = SimpleNamespace(_tasks={asyncio.create_task(fail()) for _ in range(3)})
        await asyncio.wait(run._tasks)
        with pytest.raises(ClaimLost):
            BatchRun._raise_failures(cast("BatchRun", run))
        gc.collect()
    finally:
        loop.set_exception_handler(handler)
    assert (run._tasks, reported) == (set(), [])


async def test_batch_of_embeddings_is_answered_and_charged(lab: BatchLab) -> None:
    url = "/v1/embeddings"
    bodies = [
        {"model": "base", "input": [[4], [1, 2, 3]]},
        {"model": "base", "input": [[2] * 300]},
        {"model": "base", "input": "a", "encoding_format": "bytes_only"},
    ]
    lines = [{"custom_id": str(n), "method": "POST", "url": url, "body": body} for n, body in enumerate(bodies)]
    batch = await lab.create(lines, endpoint=url)
    async with lab.running():
        batch = await lab.finished(batch)
    [answer], refused = await lab.outputs(batch)
    body = answer["response"]["body"]
    assert [one["index"] for one in body["data"]] == [0, 1]
    assert body["data"][0]["embedding"] == pytest.approx([0.6, 0.0, -0.8])
    errors = [error["response"]["body"]["error"] for error in refused]
    assert [(error["param"], error["code"]) for error in errors] == [
        ("input", "context_length_exceeded"),
        ("encoding_format", "unsupported_parameter"),
    ]
    [event] = lab.gateway.usage()
    assert (event.endpoint, event.completion_tokens) == ("batches", 0)
    assert event.prompt_tokens == body["usage"]["prompt_tokens"]


async def test_batch_is_answered_and_charged(lab: BatchLab) -> None:
    lines = [line(f"line {number}") for number in range(30)]
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    batch = await lab.create(lines, metadata={"job": "nightly"}, output_expires_after=expiry)
    assert (batch.status, batch.errors, batch.output_file_id) == ("validating", None, None)
    async with lab.running():
        batch = await lab.finished(batch)
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 30, "completed": 30, "failed": 0}
    assert (batch.metadata, batch.error_file_id) == ({"job": "nightly"}, None)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at  # type: ignore[operator]
    answers, errors = await lab.outputs(batch)
    assert (ids(answers), errors) == ([f"line {number}" for number in range(30)], [])
    assert len({one["id"] for one in answers}) == 30
    first = answers[0]
    assert first["error"] is None
    assert first["response"]["status_code"] == 200
    assert first["response"]["body"]["object"] == "chat.completion"
    events = {event.request_id: event for event in lab.gateway.usage()}
    assert {event.endpoint for event in events.values()} == {"batches"}
    for one in answers:
        event, usage = events.pop(one["response"]["request_id"]), one["response"]["body"]["usage"]
        assert (event.prompt_tokens, event.completion_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert events == {}
    assert {(add.is_background, add.priority) for add in lab.gateway.engine.adds} == {(True, 0)}
    file = await lab.gateway.openai.files.retrieve(batch.output_file_id or "")
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert file.expires_at is not None
    assert file.created_at + 3600 <= file.expires_at < file.created_at + 2 * 3600


@pytest.mark.parametrize(
    ("url", "kind"), [("/v1/completions", "text_completion"), ("/v1/responses", "response")], ids=["text", "responses"]
)
async def test_other_endpoints_can_be_batched(lab: BatchLab, url: str, kind: str) -> None:
    asked = {"prompt": "a"} if kind == "text_completion" else {"input": "a"}
    one = {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "base", **asked}}
    batch = await lab.create([one], endpoint=url)
    async with lab.running():
        answers, errors = await lab.outputs(await lab.finished(batch))
    assert errors == []
    assert answers[0]["response"]["body"]["object"] == kind
    assert [add.is_background for add in lab.gateway.engine.adds] == [True]


async def test_lines_of_an_adapter_run_together(lab: BatchLab) -> None:
    for name in "abc":
        lab.gateway.add_adapter("acme", name)
    batch = await lab.create([line(f"{number}", model=f"acme/{'abc'[number % 3]}") for number in range(60)])
    async with lab.running():
        batch = await lab.finished(batch)
    digests = [add.digest for add in lab.gateway.engine.adds]
    assert len(digests) == 60
    # A few lines of two adapters run at the same time.
    spans = [max(places) - min(places) for places in map(partial(places_of, digests), set(digests))]
    assert len(spans) == 3
    assert max(spans) < 20 + 4
    answers, _ = await lab.outputs(batch)
    assert ids(answers) == [f"{number}" for number in range(60)]


async def test_wrong_lines_fail_alone(lab: BatchLab) -> None:
    lab.gateway.add_adapter("other", "secret")
    lines = [line("good"), line("foreign", model="other/secret"), line("absent", model="other/absent")]
    lines += [line("bad", temperature="hot"), line("long", max_tokens=100_000)]
    async with lab.running():
        batch = await lab.finished(await lab.create(lines))
    answers, errors = await lab.outputs(batch)
    assert ids(answers) == ["good"]
    assert [(one["custom_id"], one["response"]["status_code"]) for one in errors] == [
        ("foreign", 404),
        ("absent", 404),
        ("bad", 400),
        ("long", 400),
    ]
    said = [one["response"]["body"]["error"] for one in errors]
    assert said[0]["message"] == said[1]["message"].replace("absent", "secret")
    assert [one["code"] for one in said] == [
        *("model_not_found", "model_not_found", "invalid_type", "context_length_exceeded"),
    ]
    assert (batch.status, batch.request_counts and batch.request_counts.failed) == ("completed", 4)


async def test_wrong_file_ends_the_batch(lab: BatchLab) -> None:
    lines = [line("a"), line("a"), {**line("b"), "method": "GET"}, line("c", stream=True), line("d", url="/v1/x")]
    async with lab.running():
        batch = await lab.finished(await lab.create(content_of(lines) + b"{oops\n"))
        many = await lab.finished(await lab.create(b"[]\n" * 50_000))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(one.line, one.code, one.param) for one in batch.errors.data] == [
        (2, "duplicate_custom_id", "custom_id"),
        (3, "invalid_method", "method"),
        (4, "stream_not_supported", "body.stream"),
        (5, "mismatched_url", "url"),
        (6, "invalid_json_line", None),
    ]
    assert many.errors is not None
    assert len(many.errors.data or []) == 100
    assert lab.gateway.engine.adds == []


async def test_spent_quota_delays_the_lines(lab: BatchLab) -> None:
    lab.gateway.limit("concurrent_requests", 1)
    async with lab.running():
        batch = await lab.finished(await lab.create([line(f"{number}") for number in range(12)]))
    assert (batch.status, batch.request_counts and batch.request_counts.completed) == ("completed", 12)
    assert len(lab.gateway.usage()) == 12


@pytest.fixture
def within_a_day(accounts: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time stands still, so that no day ends during the test, and no counter begins again."""
    now_us = accounts.now_us()
    monkeypatch.setattr(Database, "now_us", lambda *_: now_us)


@pytest.mark.usefixtures("within_a_day")
async def test_tokens_of_batches_have_a_quota_of_their_own(lab: BatchLab) -> None:
    async with lab.running():
        await lab.finished(await lab.create([line("a")]))
        used = lab.tokens()
        # Room for one more line. Requests reserve max_tokens, and the scripted answers are shorter.
        lab.gateway.limit("batch_tokens_per_day", used + 4)
        batch = await lab.create([line("b"), line("c")])
        await lab.until(batch, lambda now: now.request_counts.completed == 1)
        await asyncio.sleep(0.2)
        assert (await lab.gateway.openai.batches.retrieve(batch.id)).status == "in_progress"
        # Other requests do not count, and pass.
        for _ in range(3):
            await lab.gateway.openai.chat.completions.create(
                model="base", max_tokens=4, messages=[{"role": "user", "content": "a"}]
            )
        lab.gateway.limit("batch_tokens_per_day", 10 * used)
        batch = await lab.finished(batch)
    assert batch.request_counts is not None
    assert batch.request_counts.completed == 2


@pytest.mark.usefixtures("within_a_day")
async def test_spent_quota_of_an_adapter_delays_only_its_lines(lab: BatchLab) -> None:
    policies, spent = QuotaPolicies(lab.gateway.database), lab.gateway.add_adapter("acme", "a")
    lab.gateway.add_adapter("acme", "b")
    policies.set(spent, "tokens_per_day", 12)
    # A pause of the whole batch would outlast the test.
    lab.pace = replace(lab.pace, retry_s=3600.0)
    async with lab.running():
        batch = await lab.create([line(f"{number}", model=f"acme/{'ab'[number % 2]}") for number in range(40)])
        # All lines of b, and the one of a that the quota admits.
        await lab.until(batch, lambda now: now.request_counts.completed == 21)
    policies.set(spent, "tokens_per_day", 100_000)
    async with lab.running():
        batch = await lab.finished(batch)
    answers, errors = await lab.outputs(batch)
    assert (ids(answers), errors) == ([f"{number}" for number in range(40)], [])
    assert len(lab.gateway.usage()) == 40


async def test_batches_pay_a_part_of_the_price(lab: BatchLab) -> None:
    listed = Price(
        id=new_id("prc"),
        tenant_id=None,
        scope="all",
        currency="USD",
        prompt_nanos=4_000_000,
        cached_nanos=4_000_000,
        completion_nanos=8_000_000,
        batch_percent=50,
        effective_us=0,
        created_us=0,
    )
    with lab.gateway.database.write() as connection:
        connection.execute(insert(prices).values(asdict(listed)))
    async with lab.running():
        await lab.finished(await lab.create([line("a")]))
    await lab.gateway.openai.chat.completions.create(
        model="base", max_tokens=4, messages=[{"role": "user", "content": "a"}]
    )
    batch, chat = lab.gateway.usage()
    assert (batch.endpoint, chat.endpoint, batch.price_id, chat.price_id) == ("batches", "chat", listed.id, listed.id)
    assert batch.cost_nanos == 2 * batch.prompt_tokens + 4 * batch.completion_tokens
    assert chat.cost_nanos == 4 * chat.prompt_tokens + 8 * chat.completion_tokens


async def test_lines_have_the_default_tier_whatever_they_ask_for(lab: BatchLab) -> None:
    async with lab.running():
        lines = [line(tier, service_tier=tier) for tier in ("flex", "priority", "auto")]
        answers, errors = await lab.outputs(await lab.finished(await lab.create(lines)))
    assert errors == []
    assert {answer["response"]["body"]["service_tier"] for answer in answers} == {"default"}
    assert {event.service_tier for event in lab.gateway.usage()} == {"default"}
    assert {add.service_tier for add in lab.gateway.engine.adds} == {"default"}


async def test_request_above_a_quota_fails(lab: BatchLab) -> None:
    lab.gateway.limit("tokens_per_minute", 2)
    async with lab.running():
        _, errors = await lab.outputs(await lab.finished(await lab.create([line("a")])))
    assert errors[0]["response"]["body"]["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("metric", ["batch_tokens_per_day", "concurrent_requests"])
async def test_request_fails_if_a_quota_is_zero(lab: BatchLab, metric: str) -> None:
    lab.gateway.limit(metric, 0)
    async with lab.running():
        _, errors = await lab.outputs(await lab.finished(await lab.create([line("a")])))
    response = errors[0]["response"]
    assert (response["status_code"], response["body"]["error"]["param"]) == (429, metric)


async def test_adapter_that_cannot_be_loaded_delays_only_its_lines(
    lab: BatchLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its rest, the adapter's lines would come first."""

    async def settle_slowly(*args: Any) -> None:
        if args[-1] is line_run.UNANSWERED:
            await asyncio.sleep(40 * lab.limits.gather_s)
        await settle(*args)

    monkeypatch.setattr(line_run, "settle", settle_slowly)
    # The rest outlasts the test.
    monkeypatch.setattr(engine_failures, "RETRY_S", 3600.0)
    for name in "ab":
        lab.gateway.add_adapter("acme", name)
    engine, is_down = lab.gateway.engine, True

    def script(add: Add) -> Script:
        is_lost = is_down and add.digest == digest_of("acme/a@1")
        return Script(token_ids=(), error="adapter_unavailable") if is_lost else Script(token_ids=(5, 6))

    engine.script = script
    lab.pace = replace(lab.pace, retry_s=3600.0)
    batch = await lab.create([line(f"{number}", model=f"acme/{'ab'[number % 2]}") for number in range(20)])
    async with lab.running():
        await lab.until(batch, lambda now: now.request_counts.completed == 10)
    # At most one line for each place in the engine was tried.
    assert len(engine.adds) - 10 <= lab.limits.capacity()
    is_down = False
    async with lab.running():
        batch = await lab.finished(batch)
    answers, errors = await lab.outputs(batch)
    assert (len(answers), errors) == (20, [])


async def test_lines_of_an_adapter_that_cannot_be_loaded_for_long_fail(lab: BatchLab) -> None:
    lab.gateway.add_adapter("acme", "a")
    lab.gateway.engine.script = lambda add: Script(token_ids=(), error="adapter_unavailable")
    lab.pace = replace(lab.pace, adapter_s=0.1)
    async with lab.running():
        batch = await lab.finished(await lab.create([line(f"{number}", model="acme/a") for number in range(12)]))
    _, errors = await lab.outputs(batch)
    assert {one["response"]["body"]["error"]["code"] for one in errors} == {"adapter_unavailable"}
    assert len(errors) == 12
    # A line that was not tried before fails at its first attempt.
    assert len(lab.gateway.engine.adds) < 4 * 12


async def test_adapter_that_seldom_fails_to_load_fails_no_line(lab: BatchLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two failures that are far apart, it may have been loadable."""
    lab.gateway.add_adapter("acme", "a")
    engine, passed_s = lab.gateway.engine, 0.0
    monkeypatch.setattr(batch_run, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s))

    def script(add: Add) -> Script:
        nonlocal passed_s
        passed_s = 1000.0 * (len(engine.adds) > 1)
        return Script(token_ids=(5, 6)) if len(engine.adds) > 2 else Script(token_ids=(), error="adapter_unavailable")

    engine.script = script
    async with lab.running():
        answers, errors = await lab.outputs(await lab.finished(await lab.create([line("a", model="acme/a")])))
    assert (ids(answers), errors) == (["a"], [])


async def test_overloaded_engine_fails_no_line(lab: BatchLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "MAX_TRIES", 2)
    engine = lab.gateway.engine

    def script(add: Add) -> Script:
        return Script(token_ids=(), error="overloaded") if len(engine.adds) <= 4 else Script(token_ids=(5, 6))

    engine.script = script
    async with lab.running():
        answers, errors = await lab.outputs(await lab.finished(await lab.create([line("a")])))
    assert (ids(answers), errors) == (["a"], [])


@pytest.mark.parametrize(("error", "status"), [("adapter_unavailable", 429), ("overloaded", 200)])
@pytest.mark.usefixtures("within_a_day")
async def test_line_without_an_answer_pays_for_the_load_of_its_adapter(
    lab: BatchLab, monkeypatch: pytest.MonkeyPatch, error: str, status: int
) -> None:
    """Unless the engine has not begun to load it."""
    for name in "ab":
        lab.gateway.add_adapter("acme", name)
    lab.gateway.limit("cold_loads_per_minute", 1)
    engine = lab.gateway.engine

    def script(add: Add) -> Script:
        return Script(token_ids=(), error=error, has_run=False) if len(engine.adds) == 1 else Script(token_ids=(5,))

    engine.script = script
    # The rest outlasts the test.
    monkeypatch.setattr(engine_failures, "RETRY_S", 3600.0)
    lab.pace = replace(lab.pace, retry_s=3600.0)
    async with lab.running():
        await lab.create([line("a", model="acme/a")])
        async with asyncio.timeout(20):
            while not lab.gateway.usage():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    body = {"model": "acme/b", "prompt": "a", "max_tokens": 2}
    answer = await lab.gateway.http.post("/v1/completions", json=body)
    assert answer.status_code == status
    if status == 429:
        assert answer.json()["error"]["param"] == "cold_loads_per_minute"


async def test_line_that_cannot_be_stored_fails(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor
) -> None:
    """Its request does not wait for quota, because waiting frees nothing."""
    settings = GatewaySettings(response_key=KEY)
    async with open_gateway(accounts, tokenizer, threads, settings) as gateway:
        allow(accounts, gateway.tenant.id)
        gateway.limit("stored_bytes", 0)
        lab = BatchLab(gateway)
        async with lab.running():
            batch = await lab.finished(await lab.create([line("kept", store=True), line("other")]))
        answers, [error] = await lab.outputs(batch)
    assert ids(answers) == ["other"]
    assert error["response"]["status_code"] == 429
    assert error["response"]["body"]["error"]["param"] == "stored_bytes"


async def test_lines_wait_while_other_requests_wait(lab: BatchLab) -> None:
    lab.gateway.engine.num_waiting = 3
    lab.limits = replace(lab.limits, queue_s=3600)
    async with lab.running():
        batch = await lab.create([line("a")])
        await lab.until(batch, lambda now: now.status == "in_progress")
        await asyncio.sleep(0.1)
        assert lab.gateway.engine.adds == []
        lab.gateway.engine.num_waiting = 0
        assert (await lab.finished(batch)).status == "completed"


async def test_lines_fill_the_engine(lab: BatchLab) -> None:
    most = 0

    def script(add: Any) -> Script:
        nonlocal most
        most = max(most, lab.gateway.engine.num_running + 1)
        # Lines end only once the engine is full.
        return Script(token_ids=(5, 6), delay_s=0.005 if most == 6 else 3600)

    lab.gateway.engine.script = script
    async with lab.running():
        await lab.create([line(f"{number}") for number in range(40)])
        while most < 6:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert most == 6


async def test_cancelled_batch_keeps_its_answers(lab: BatchLab) -> None:
    resume = lab.hold_after(4)
    async with lab.running():
        batch = await lab.create([line(f"{number}") for number in range(100)])
        await lab.until(batch, lambda now: now.request_counts.completed == 4)
        cancelled = await lab.gateway.openai.batches.cancel(batch.id)
        assert cancelled.status == "cancelling"
        resume.set()
        batch = await lab.finished(batch)
    assert (batch.status, batch.cancelled_at is None) == ("cancelled", False)
    answers, errors = await lab.outputs(batch)
    assert len(answers) >= 4
    assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
    assert sorted(ids(answers) + ids(errors), key=int) == [f"{number}" for number in range(100)]
    assert len(lab.gateway.usage()) == len(answers)
    with pytest.raises(ConflictError, match="the batch is cancelled"):
        await lab.gateway.openai.batches.cancel(batch.id)


async def test_expired_batch_names_what_did_not_run(lab: BatchLab) -> None:
    batch = await lab.create([line("a"), line("b")])
    with lab.gateway.database.write() as connection:
        connection.exec_driver_sql("UPDATE batches SET expires_us = 1")
    async with lab.running():
        batch = await lab.finished(batch)
    _, errors = await lab.outputs(batch)
    assert (batch.status, ids(errors)) == ("expired", ["a", "b"])
    assert errors[0]["response"] is None
    assert errors[0]["error"]["code"] == "batch_expired"


@pytest.mark.parametrize("how", ["revoked", "suspended"])
async def test_lines_fail_without_their_caller(lab: BatchLab, how: str) -> None:
    batch = await lab.create([line("a"), line("b")])
    if how == "revoked":
        for key in lab.gateway.services.callers.api_keys.list(lab.gateway.tenant.id, 10).data:
            lab.gateway.services.callers.api_keys.revoke(key.id)
    else:
        Tenants(lab.gateway.database).update(lab.gateway.tenant.id, TenantChanges(state="suspended"), lambda _: None)
    owner = Owner(lab.gateway.tenant.id, "", is_limited=False)
    async with lab.running(), asyncio.timeout(20):
        while not (found := lab.gateway.kept.batches.get(owner, batch.id)).is_finished:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert (found.state, found.num_failed) == ("completed", 2)
    assert lab.gateway.engine.adds == []


@pytest.mark.parametrize("how", ["disabled", "purged"])
@pytest.mark.usefixtures("within_a_day")
async def test_adapter_that_goes_midway_fails_its_lines(lab: BatchLab, how: str) -> None:
    adapter_id = lab.gateway.add_adapter("acme", "support")
    resume = lab.hold_after(4)
    async with lab.running():
        batch = await lab.create([line(f"{number}", model="acme/support") for number in range(100)])
        await lab.until(batch, lambda now: now.request_counts.completed == 4)
        if how == "purged":
            # A purge waits for running requests, so the batch must rest.
            policy = QuotaPolicies(lab.gateway.database).set(lab.gateway.tenant.id, "batch_tokens_per_day", 30)
            resume.set()
            async with asyncio.timeout(20):
                while True:
                    with suppress(RequestsRunning):
                        PurgeRows(lab.gateway.database).purge_adapter(adapter_id)
                        break
                    await asyncio.sleep(0.01)
            QuotaPolicies(lab.gateway.database).delete(policy.id)
        else:
            with lab.gateway.database.write() as connection:
                connection.exec_driver_sql(f"UPDATE adapters SET disabled_us = 1 WHERE id = '{adapter_id}'")
            resume.set()
        batch = await lab.finished(batch)
    answers, errors = await lab.outputs(batch)
    assert len(answers) + len(errors) == 100
    assert {one["response"]["body"]["error"]["code"] for one in errors} == {"model_not_found"}


async def test_tenant_that_is_suspended_midway_keeps_its_answers(lab: BatchLab) -> None:
    resume = lab.hold_after(4)
    owner = Owner(lab.gateway.tenant.id, "", is_limited=False)
    async with lab.running():
        batch = await lab.create([line(f"{number}") for number in range(100)])
        await lab.until(batch, lambda now: now.request_counts.completed == 4)
        Tenants(lab.gateway.database).update(lab.gateway.tenant.id, TenantChanges(state="suspended"), lambda _: None)
        resume.set()
        async with asyncio.timeout(20):
            while not (found := lab.gateway.kept.batches.get(owner, batch.id)).is_finished:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert (found.state, found.num_completed + found.num_failed) == ("completed", 100)
    assert found.num_completed > 3
    assert found.num_failed > 50
    assert len(lab.gateway.usage()) == found.num_completed


async def test_batches_of_others_are_like_unknown_ones(lab: BatchLab) -> None:
    batch = await lab.create([line("a")])
    headers = {"authorization": f"Bearer {lab.gateway.key_of('other')}"}
    for one in (batch.id, "bat_" + "0" * 32, "x"):
        for method, path in (("GET", ""), ("POST", "/cancel")):
            answer = await lab.gateway.http.request(method, f"/v1/batches/{one}{path}", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "batch_not_found")
    body = {"input_file_id": batch.input_file_id, "endpoint": CHAT, "completion_window": "24h"}
    for file_id in (batch.input_file_id, "fil_" + "0" * 32):
        answer = await lab.gateway.http.post("/v1/batches", json={**body, "input_file_id": file_id}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "file_not_found")
    assert (await lab.gateway.http.get("/v1/batches", headers=headers)).json()["data"] == []


async def test_lists_are_paged(lab: BatchLab) -> None:
    made = [(await lab.create([line("a")])).id for _ in range(3)]
    assert [one.id async for one in lab.gateway.openai.batches.list(limit=2)] == sorted(made, reverse=True)


async def test_wrong_calls_are_refused(lab: BatchLab, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequestError, match="endpoint"):
        await lab.create([line("a")], endpoint="/v1/moderations")
    with pytest.raises(BadRequestError, match="metadata"):
        await lab.create([line("a")], metadata={f"{number}": "x" for number in range(17)})
    with pytest.raises(BadRequestError, match="metadata cannot have the key"):
        await lab.create([line("a")], metadata={batch_rows.OUTPUT_LIFETIME: "1"})
    with pytest.raises(BadRequestError, match=r"output_expires_after\.seconds"):
        await lab.create([line("a")], output_expires_after={"anchor": "created_at", "seconds": 60})
    batch = await lab.create([line("a")])
    with pytest.raises(ConflictError, match="has not finished needs the file"):
        await lab.gateway.openai.files.delete(batch.input_file_id)
    async with lab.running():
        batch = await lab.finished(batch)
    with pytest.raises(BadRequestError, match="purpose must be"):
        await lab.gateway.openai.batches.create(
            input_file_id=batch.output_file_id or "", endpoint=CHAT, completion_window="24h"
        )
    await lab.gateway.openai.files.delete(batch.input_file_id)
    with pytest.raises(NotFoundError):
        await lab.gateway.openai.batches.create(
            input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
        )
    monkeypatch.setattr(batch_rows, "MAX_OPEN_BATCHES", 1)
    await lab.create([line("a")])
    with pytest.raises(RateLimitError, match="1 batches of this tenant"):
        await lab.create([line("a")])
