from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from openai import AsyncOpenAI
from sqlalchemy import func, select, update
from sqlalchemy.exc import OperationalError

from loramux.admin.serving.expired_rows import ExpiredRows
from loramux.engine.protocol.messages import Add
from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.admission.admission import Admission
from loramux.platform.ledger.events import UsageEvent
from loramux.platform.requests.services import GatewaySettings
from loramux.platform.responses_api import background, stored_responses
from loramux.platform.stored_responses import background_store, sealing
from loramux.platform.stored_responses.background_store import BackgroundStore
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.gateways import Gateway, listening, open_gateway
from tests.platform.responses_api.test_stored import MISSING, respond, status_of
from tests.platform.responses_api.transcripts import EVENT, RESPONSES
from tests.platform.scripted_engine import Script
from tests.platform.storing import KEY, allow, answers

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def patient_cancellations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancellation that takes long returns earlier, and a test would not see the end that it expects."""
    monkeypatch.setattr(stored_responses, "CANCEL_WAIT_S", 60.0)


UNFINISHED = ("queued", "in_progress")


def stalls(gateway: Gateway, num_tokens: int, text: str = "one two three four five six") -> None:
    """Make the engine stop in the middle of its answer until it is aborted."""
    answers(gateway, text, stall_after=num_tokens)


def delayed(script: Callable[[Add], Script]) -> Callable[[Add], Script]:
    return lambda add: replace(script(add), delay_s=0.005)


async def begin(gateway: Gateway, **body: Any) -> dict[str, Any]:
    made = await respond(gateway, background=True, **body)
    assert (made["status"], made["background"], made["store"], made["output"]) == ("queued", True, True, [])
    return made


async def retrieved(gateway: Gateway, made: dict[str, Any]) -> dict[str, Any]:
    response = await gateway.http.get(f"{RESPONSES}/{made['id']}")
    assert response.status_code == 200, response.text
    return dict(response.json())


async def finished(gateway: Gateway, made: dict[str, Any]) -> dict[str, Any]:
    """Poll until a response has ended."""

    async def is_finished() -> bool:
        return (await retrieved(gateway, made))["status"] not in UNFINISHED

    await until(is_finished)
    return await retrieved(gateway, made)


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    for _ in range(3000):
        if await is_so():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it never happens")


async def until_begun(gateway: Gateway, response_id: str) -> None:
    async def has_begun() -> bool:
        return (await retrieved(gateway, {"id": response_id}))["status"] != "queued"

    await until(has_begun)


async def until_running(gateway: Gateway) -> str:
    """Wait until the engine runs its first request, and return the ID of the response."""

    async def is_running() -> bool:
        return gateway.engine.num_running > 0

    await until(is_running)
    return f"resp_{gateway.engine.adds[0].sequence_id[4:36]}"


async def until_stored(gateway: Gateway, response_id: str, num_events: int) -> None:
    """Wait until at least this many events are stored."""
    query = select(schema.responses.c.num_events).where(schema.responses.c.id == response_id)

    async def are_stored() -> bool:
        with gateway.database.read() as connection:
            return (connection.execute(query).scalar_one() or 0) >= num_events

    await until(are_stored)


async def settled(gateway: Gateway) -> list[UsageEvent]:
    assert await gateway.services.run.requests.drain(30)
    return gateway.usage()


def events_in(text: str) -> list[dict[str, Any]]:
    events = [json.loads(block.split("\n")[1].removeprefix("data: ")) for block in text.split("\n\n")[:-1]]
    for event in events:
        EVENT.validate_python(event)
    return events


async def replayed(gateway: Gateway, response_id: str, query: str = "") -> list[dict[str, Any]]:
    response = await gateway.http.get(f"{RESPONSES}/{response_id}?stream=true{query}")
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_in(response.text)


async def test_response_is_made_without_a_connection(storing: Gateway) -> None:
    stalls(storing, 3)
    made = await begin(storing)
    await until_begun(storing, made["id"])
    assert await retrieved(storing, made) == {**made, "status": "in_progress"}
    answers(storing, "Secret answer")
    other = await begin(storing, metadata={"a": "b"})
    found = await finished(storing, other)
    assert (found["status"], found["metadata"]) == ("completed", {"a": "b"})
    assert found["output"][0]["content"][0]["text"] == "Secret answer"

    async def is_charged() -> bool:
        return bool(storing.usage())

    # The response is stored first.
    await until(is_charged)
    [event] = storing.usage()
    assert event.completion_tokens == found["usage"]["output_tokens"]
    assert event.prompt_tokens == found["usage"]["input_tokens"]
    assert event.endpoint == "responses"
    # A finished response can be continued, an unfinished one cannot.
    await respond(storing, previous_response_id=other["id"])
    body = {"model": "base", "input": "Hi", "previous_response_id": made["id"]}
    refused = await storing.http.post(RESPONSES, json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "response_not_finished")
    await storing.openai.responses.cancel(made["id"])


async def test_response_that_reaches_its_limit_is_incomplete(storing: Gateway) -> None:
    made = await begin(storing, max_output_tokens=2)
    found = await finished(storing, made)
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["usage"]["output_tokens"] == 2


async def test_stream_can_be_resumed_after_any_event(storing: Gateway) -> None:
    answers(storing, "one two three")
    sent = {"model": "base", "input": "Hi", "background": True, "stream": True}
    events = events_in((await storing.http.post(RESPONSES, json=sent)).text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:5] == ["created", "queued", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-1] == "completed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["response"]["status"] for event in (events[0], events[2], events[-1])] == [
        "queued",
        "in_progress",
        "completed",
    ]
    response_id = events[0]["response"]["id"]
    assert await retrieved(storing, {"id": response_id}) == events[-1]["response"]
    assert await replayed(storing, response_id) == events
    for number in range(len(events)):
        assert await replayed(storing, response_id, f"&starting_after={number}") == events[number + 1 :]
    for query, param in (
        (f"stream=true&starting_after={len(events)}", "starting_after"),
        (f"stream=true&starting_after={2**31}", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("starting_after=1", "starting_after"),
    ):
        response = await storing.http.get(f"{RESPONSES}/{response_id}?{query}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), query
    other = {"authorization": f"Bearer {storing.key_of('other')}"}
    response = await storing.http.get(f"{RESPONSES}/{response_id}?stream=true", headers=other)
    assert (response.status_code, response.json()["error"]["code"]) == MISSING


async def test_stream_outlives_its_client_and_is_followed_while_it_runs(
    storing: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "FLUSH_S", 0.01)
    token_ids = storing.services.prompts.tokenizer.encode("one two three four five six seven")[1:]
    storing.engine.script = lambda add: Script(token_ids=token_ids, delay_s=0.02)
    async with (
        listening(storing.app) as url,
        AsyncOpenAI(api_key=storing.key, base_url=f"{url}/v1", max_retries=0) as client,
    ):
        stream = await client.responses.create(model="base", input="Hi", background=True, stream=True)
        seen: list[Any] = [await anext(stream) for _ in range(3)]
        await stream.close()
        resumed = await client.responses.retrieve(
            seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number
        )
        seen += [event async for event in resumed]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].type == "response.completed"
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert text == seen[-1].response.output_text == "one two three four five six seven"
    [event] = await settled(storing)
    assert event.completion_tokens == seen[-1].response.usage.output_tokens


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_cancelled_response_keeps_and_charges_what_was_generated(storing: Gateway, is_streamed: bool) -> None:
    stalls(storing, 3)
    if is_streamed:
        sent = {"model": "base", "input": "Hi", "background": True, "stream": True}
        streaming = asyncio.create_task(storing.http.post(RESPONSES, json=sent))
        response_id = await until_running(storing)
        await until_stored(storing, response_id, 8)
    else:
        response_id = (await begin(storing))["id"]
        await until_begun(storing, response_id)
    cancelled = await storing.openai.responses.cancel(response_id)
    found = await retrieved(storing, {"id": response_id})
    assert (cancelled.status, found["status"], found["error"]) == ("cancelled", "cancelled", None)
    assert found["output"][0]["status"] == "incomplete"
    assert found["output"][0]["content"][0]["text"].startswith("one")
    [event] = await settled(storing)
    assert (event.status, event.completion_tokens) == ("aborted", 3)
    assert found["usage"]["output_tokens"] == 3
    # Cancelling again changes nothing.
    assert (await storing.openai.responses.cancel(response_id)).to_dict() == found
    if is_streamed:
        events = events_in((await streaming).text)
        assert (events[-1]["type"], events[-1]["response"]) == ("response.incomplete", found)
        assert await replayed(storing, response_id) == events


async def test_only_unfinished_responses_in_the_background_can_be_cancelled(storing: Gateway) -> None:
    plain, made = await respond(storing), await begin(storing)
    await finished(storing, made)
    assert await status_of(storing, f"{plain['id']}/cancel", "POST") == (400, "invalid_value")
    assert await status_of(storing, f"{made['id']}/cancel", "POST") == (400, "response_finished")
    assert await status_of(storing, "resp_unknown/cancel", "POST") == MISSING
    assert await status_of(storing, f"{made['id']}/cancel", "POST", storing.key_of("other")) == MISSING
    for response_id in (plain["id"], made["id"]):
        assert await status_of(storing, f"{response_id}?stream=true") == (400, "unsupported_parameter")


async def test_deleting_an_unfinished_response_cancels_it(storing: Gateway) -> None:
    stalls(storing, 3)
    made = await begin(storing)
    await until_begun(storing, made["id"])
    await storing.openai.responses.delete(made["id"])
    assert await status_of(storing, made["id"]) == MISSING
    [event] = await settled(storing)
    assert (event.status, event.completion_tokens) == ("aborted", 3)


async def test_cancellation_on_another_server_ends_the_response(storing: Gateway) -> None:
    stalls(storing, 3)
    made = await begin(storing)
    found = storing.services.stored.responses.get(storing.tenant.id, made["id"])
    assert found is not None
    storing.services.stored.background.cancel(found)
    assert (await retrieved(storing, made))["status"] == "cancelled"
    # The server that makes the response learns of it at its next checkpoint.
    await storing.services.run.maintenance.checkpoint()
    [event] = await settled(storing)
    assert event.status == "aborted"
    assert (await retrieved(storing, made))["usage"]["output_tokens"] == event.completion_tokens


async def test_cancellation_that_comes_too_late_is_still_one(storing: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = BackgroundStore.finish

    def cancelled_before(store: BackgroundStore, stored: Any, *rest: Any) -> str | None:
        store.cancel(stored)
        return finish(store, stored, *rest)

    monkeypatch.setattr(BackgroundStore, "finish", cancelled_before)
    sent = {"model": "base", "input": "Hi", "background": True, "stream": True}
    events = events_in((await storing.http.post(RESPONSES, json=sent)).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["status"] == "cancelled"
    assert await retrieved(storing, events[0]["response"]) == events[-1]["response"]
    [event] = await settled(storing)
    assert event.completion_tokens == events[-1]["response"]["usage"]["output_tokens"]


async def test_failed_engine_fails_the_response(storing: Gateway) -> None:
    answers(storing, "one two", error="nan_logits")
    made = await begin(storing)
    found = await finished(storing, made)
    assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
    assert found["output"][0]["content"][0]["text"] == "one two"
    [event] = await settled(storing)
    assert event.status == "model_failed"


def expire_lease(gateway: Gateway, response_id: str) -> None:
    """Make the database look as if the server had died a minute ago, and let another server recover its requests."""
    reservations = schema.reservations
    with gateway.database.write() as connection:
        is_own = reservations.c.id == response_id.replace("resp", "req")
        connection.execute(update(reservations).where(is_own).values(lease_expires_us=0))
        is_this = schema.responses.c.id == response_id
        connection.execute(
            update(schema.responses).where(is_this).values(created_us=schema.responses.c.created_us - 61_000_000)
        )
    assert Admission(gateway.database).recover_expired() == 1


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_dead_server_fails_the_response_and_charges_what_is_kept(storing: Gateway, is_streamed: bool) -> None:
    stalls(storing, 3)
    sent = {"model": "base", "input": "Hi", "background": True, "stream": is_streamed}
    posting = asyncio.create_task(storing.http.post(RESPONSES, json=sent))
    response_id = await until_running(storing)
    if is_streamed:
        await until_stored(storing, response_id, 8)
    # A checkpoint of the request does not count tokens that are not kept.
    await storing.services.run.maintenance.checkpoint()
    expire_lease(storing, response_id)
    found = await retrieved(storing, {"id": response_id})
    assert (found["status"], found["error"]["code"]) == ("failed", "server_error")
    assert found["error"]["type"] == "server_stopped"
    [event] = storing.usage()
    assert event.status == "recovered"
    if is_streamed:
        events = events_in((await posting).text)
        assert await replayed(storing, response_id) == events
        assert [(one["type"], one.get("code")) for one in events[-2:]] == [
            ("error", "server_stopped"),
            ("response.failed", None),
        ]
        deltas = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
        assert event.completion_tokens == len(deltas) == 3
    else:
        assert event.completion_tokens == 0
    # If the server was only slow, its late settlement changes nothing.
    storing.services.run.requests.cancel(event.request_id)
    [late] = await settled(storing)
    assert late.completion_tokens == event.completion_tokens
    with storing.database.read() as connection:
        query = select(func.coalesce(func.sum(schema.usage_adjustments.c.completion_tokens), 0))
        assert connection.execute(query).scalar_one() == 0
    assert (await retrieved(storing, {"id": response_id})) == found


async def test_crash_between_storing_and_settling_charges_the_whole_answer(
    storing: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_blocked = asyncio.Event()

    async def never(*_: Any) -> None:
        is_blocked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(background, "settle", never)
    made = await begin(storing)
    await is_blocked.wait()
    expire_lease(storing, made["id"])
    found = await retrieved(storing, made)
    [event] = storing.usage()
    assert (found["status"], event.status) == ("completed", "recovered")
    assert event.completion_tokens == found["usage"]["output_tokens"]
    for task in list(storing.services.run.requests._tasks):
        task.cancel()


async def test_failing_database_delays_events_but_loses_none(storing: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "RETRY_S", 0.01)
    failures = {"progress": 2, "finish": 2}
    originals = {name: getattr(BackgroundStore, name) for name in failures}

    def failing(name: str) -> Any:
        def call(*arguments: Any) -> Any:
            result = originals[name](*arguments)
            if failures[name]:
                # The transaction was committed, but the server does not learn of it.
                failures[name] -= 1
                raise OperationalError("commit", {}, Exception("the connection was lost"))
            return result

        return call

    for name in failures:
        monkeypatch.setattr(BackgroundStore, name, failing(name))
    answers(storing, "one two three four")
    sent = {"model": "base", "input": "Hi", "background": True, "stream": True}
    events = events_in((await storing.http.post(RESPONSES, json=sent)).text)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["status"] == "completed"
    assert failures["finish"] == 0
    [event] = await settled(storing)
    assert event.completion_tokens == events[-1]["response"]["usage"]["output_tokens"]


async def test_response_that_cannot_be_stored_costs_what_was_kept(
    storing: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OperationalError("update", {}, Exception("the disk is full"))

    monkeypatch.setattr(BackgroundStore, "finish", fail)
    monkeypatch.setattr(background, "STORE_WAIT_S", 0)
    await begin(storing)
    [event] = await settled(storing)
    assert (event.status, event.completion_tokens) == ("failed", 0)
    assert event.prompt_tokens > 0


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_response_that_is_too_long_to_be_stored_fails(
    storing: Gateway, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    monkeypatch.setattr(sealing, "MAX_CONTENT_BYTES", 1800)
    answers(storing, random.Random(0).randbytes(400).hex())
    body = {"background": True, "include": ["message.output_text.logprobs"], "top_logprobs": 0}
    if is_streamed:
        monkeypatch.setattr(background, "FLUSH_S", 0.001)
        storing.engine.script = delayed(storing.engine.script)
        sent = {"model": "base", "input": "Hi", "stream": True, **body}
        events = events_in((await storing.http.post(RESPONSES, json=sent)).text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
        found = await retrieved(storing, events[0]["response"])
        assert found == events[-1]["response"]
    else:
        found = await finished(storing, await respond(storing, **body))
    assert (found["status"], found["error"]["type"]) == ("failed", "response_too_long")
    [event] = await settled(storing)
    assert event.status == "failed"
    assert (event.completion_tokens > 0) == is_streamed


@pytest.mark.parametrize(
    ("days", "body", "code"),
    [(0, {}, "storage_not_allowed"), (30, {"store": False}, "storage_not_allowed")],
    ids=["no-days", "no-store"],
)
async def test_background_needs_storage(storing: Gateway, days: int, body: Any, code: str) -> None:
    allow(storing.database, storing.tenant.id, days)
    storing.services.callers.tenants.forget_recent()
    sent = {"model": "base", "input": "Hi", "background": True, **body}
    response = await storing.http.post(RESPONSES, json=sent)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, "background")
    assert storing.usage() == []


async def test_refused_request_leaves_no_response(storing: Gateway) -> None:
    storing.limit("requests_per_minute", 1)
    made = await begin(storing)
    await finished(storing, made)
    response = await storing.http.post(RESPONSES, json={"model": "base", "input": "Hi", "background": True})
    assert response.status_code == 429
    with storing.database.read() as connection:
        assert connection.execute(select(schema.responses.c.id)).scalars().all() == [made["id"]]


async def test_number_of_unfinished_responses_is_limited(storing: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_store, "MAX_RUNNING", 2)
    stalls(storing, 1)
    made = [await begin(storing) for _ in range(2)]
    response = await storing.http.post(RESPONSES, json={"model": "base", "input": "Hi", "background": True})
    assert (response.status_code, response.json()["error"]["param"]) == (429, "background")
    assert "retry-after" in response.headers
    await storing.openai.responses.cancel(made[0]["id"])
    await begin(storing)
    # A response whose server died does not count.
    expire_lease(storing, made[1]["id"])
    await begin(storing)
    for request_id in storing.services.run.requests.progress():
        assert storing.services.run.requests.cancel(request_id)


async def test_events_expire_before_their_response(storing: Gateway) -> None:
    sent = {"model": "base", "input": "Hi", "background": True, "stream": True}
    events = events_in((await storing.http.post(RESPONSES, json=sent)).text)
    response_id = events[0]["response"]["id"]
    with storing.database.write() as connection:
        connection.execute(update(schema.response_events).values(expires_us=0))
    for query in ("", "&starting_after=3"):
        assert await status_of(storing, f"{response_id}?stream=true{query}") == (400, "events_expired")
    assert ExpiredRows(storing.database).sweep()["response_events"] > 0
    assert await status_of(storing, f"{response_id}?stream=true") == (400, "events_expired")
    # After the last event, there is nothing to send.
    assert await replayed(storing, response_id, f"&starting_after={len(events) - 1}") == []
    assert await retrieved(storing, events[0]["response"]) == events[-1]["response"]


async def test_events_are_encrypted_and_deleted_with_their_response(storing: Gateway) -> None:
    sent = {"model": "base", "input": "Hi", "background": True, "stream": True}
    events = events_in((await storing.http.post(RESPONSES, json=sent)).text)
    with storing.database.read() as connection:
        contents = connection.execute(select(schema.response_events.c.content)).scalars().all()
    assert contents
    assert not any(b"Secret" in content for content in contents)
    await storing.openai.responses.delete(events[0]["response"]["id"])
    with storing.database.read() as connection:
        assert connection.execute(select(func.count()).select_from(schema.response_events)).scalar_one() == 0


async def test_two_servers_on_postgresql_share_responses(
    migrated_postgres_url: str, tool_tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, anyio_backend: str
) -> None:
    databases = [Database(migrated_postgres_url) for _ in range(2)]
    settings = GatewaySettings(response_key=KEY)
    async with (
        open_gateway(databases[0], tool_tokenizer, threads, settings, max_model_len=1024) as first,
        open_gateway(databases[1], tool_tokenizer, threads, settings, max_model_len=1024) as second,
    ):
        allow(databases[0], first.tenant.id)
        stalls(first, 3)
        sent = {"model": "base", "input": "Hi", "background": True, "stream": True}
        posting = asyncio.create_task(first.http.post(RESPONSES, json=sent))
        response_id = await until_running(first)
        await until_stored(first, response_id, 8)
        assert (await retrieved(second, {"id": response_id}))["status"] == "in_progress"
        following = asyncio.create_task(replayed(second, response_id, "&starting_after=1"))
        cancelled = await second.openai.responses.cancel(response_id)
        assert cancelled.status == "cancelled"
        await first.services.run.maintenance.checkpoint()
        events = events_in((await posting).text)
        assert await following == events[2:]
        assert events[-1]["response"]["status"] == "cancelled"
        [event] = await settled(first)
        assert event.completion_tokens == events[-1]["response"]["usage"]["output_tokens"] == 3
        assert await retrieved(second, {"id": response_id}) == events[-1]["response"]
    for database in databases:
        database.close()
