from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.exc import OperationalError

from loramux.admin.serving.expired_rows import ExpiredRows
from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.requests.services import GatewaySettings
from loramux.platform.stored_responses import conversation_store
from loramux.platform.stored_responses.background_store import BackgroundStore
from loramux.platform.stored_responses.conversation_store import ConversationStore
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.gateways import Gateway, open_gateway
from tests.platform.openai_api.test_tools import prompt_of
from tests.platform.responses_api.test_background import finished, settled
from tests.platform.responses_api.test_events import CALL, WEATHER
from tests.platform.responses_api.test_stored import respond
from tests.platform.responses_api.transcripts import RESPONSES, events_of
from tests.platform.storing import KEY, allow, answers

pytestmark = pytest.mark.anyio

CONVERSATIONS = "/v1/conversations"
MISSING = (404, "conversation_not_found")
QUESTION: Any = {"type": "message", "role": "user", "content": "How is Rome?"}


def question(item_id: str) -> Any:
    return {**QUESTION, "id": item_id}


async def items_of(gateway: Gateway, conversation_id: str) -> list[dict[str, Any]]:
    page = await gateway.openai.conversations.items.list(conversation_id, order="asc")
    return [item.to_dict() async for item in page]


async def status_of(
    gateway: Gateway, path: str, method: str = "GET", key: str | None = None, body: Any = None
) -> tuple[int, str | None]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    response = await gateway.http.request(method, f"{CONVERSATIONS}{path}", headers=headers, json=body)
    return response.status_code, (response.json().get("error") or {}).get("code")


async def test_conversation_is_created_changed_and_deleted(storing: Gateway) -> None:
    conversations = storing.openai.conversations
    made = await conversations.create(metadata={"topic": "demo"}, items=[QUESTION])
    assert (made.object, made.metadata) == ("conversation", {"topic": "demo"})
    assert (await conversations.retrieve(made.id)) == made
    assert (await conversations.update(made.id, metadata={"topic": "other"})).metadata == {"topic": "other"}
    assert (await conversations.retrieve(made.id)).metadata == {"topic": "other"}
    deleted = await conversations.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "conversation.deleted")
    for path, method, body in (
        (f"/{made.id}", "GET", None),
        (f"/{made.id}", "POST", {"metadata": {}}),
        (f"/{made.id}", "DELETE", None),
        (f"/{made.id}/items", "GET", None),
        (f"/{made.id}/items", "POST", {"items": [QUESTION]}),
        (f"/{made.id}/items/msg_1", "GET", None),
        (f"/{made.id}/items/msg_1", "DELETE", None),
    ):
        assert await status_of(storing, path, method, body=body) == MISSING, (path, method)
    with storing.database.read() as connection:
        assert connection.execute(select(func.count()).select_from(schema.conversation_items)).scalar_one() == 0


async def test_items_are_added_listed_read_and_deleted(storing: Gateway) -> None:
    client = storing.openai.conversations
    made = await client.create()
    assert await items_of(storing, made.id) == []
    call: Any = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}", "id": "fc/é\x00"}
    output: Any = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    added = await client.items.create(made.id, items=[QUESTION, call])
    await client.items.create(made.id, items=[output])
    items = await items_of(storing, made.id)
    assert [item["type"] for item in items] == ["message", "function_call", "function_call_output"]
    assert [item.to_dict() for item in added.data] == items[:2]
    assert (added.first_id, added.last_id, added.has_more) == (items[0]["id"], items[1]["id"], False)
    assert items[0]["content"] == [{"type": "input_text", "text": "How is Rome?"}]
    newest = await client.items.list(made.id, limit=2)
    assert [item.to_dict() for item in newest.data] == items[:0:-1]
    assert (await client.items.retrieve(items[2]["id"], conversation_id=made.id)).to_dict() == items[2]
    assert (await client.items.delete(items[2]["id"], conversation_id=made.id)).id == made.id
    assert await items_of(storing, made.id) == items[:2]
    for method in ("GET", "DELETE"):
        assert await status_of(storing, f"/{made.id}/items/{items[2]['id']}", method) == (404, "item_not_found")
    assert await status_of(storing, f"/{made.id}/items?after=x") == (400, "invalid_value")


@pytest.mark.parametrize(
    ("items", "code", "param"),
    [
        ([], "invalid_value", "items"),
        ([QUESTION] * 21, "invalid_value", "items"),
        ([{"id": "msg_1"}], "unsupported_item", "items[0]"),
        ([QUESTION, {"type": "web_search_call"}], "unsupported_item", "items[1].type"),
        ([{"role": "user", "content": 5}], "invalid_type", "items[0].content"),
        ([question("a"), question("a")], "duplicate_item", "items[1].id"),
        ([question("known")], "duplicate_item", "items[0].id"),
        (None, "invalid_type", "items"),
    ],
)
async def test_bad_items_are_named(storing: Gateway, items: Any, code: str, param: str) -> None:
    made = await storing.openai.conversations.create(items=[question("known")])
    response = await storing.http.post(f"{CONVERSATIONS}/{made.id}/items", json={"items": items})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)
    assert [item["id"] for item in await items_of(storing, made.id)] == ["known"]
    # A conversation that cannot begin with its items is not created.
    created = await storing.http.post(CONVERSATIONS, json={"items": items})
    assert (created.status_code == 200) == (items in ([], None) or param == "items[0].id")


async def test_responses_continue_and_extend_a_conversation(storing: Gateway) -> None:
    made = await storing.openai.conversations.create(items=[{"role": "developer", "content": "Be brief."}])
    answers(storing, f"<think>\nWell</think>\n\nLook.\n{CALL}")
    first = await respond(storing, conversation=made.id, tools=[WEATHER], input="How is Rome?")
    assert first["conversation"] == {"id": made.id}
    items = await items_of(storing, made.id)
    assert items[2:] == first["output"]
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "sunny"}
    answers(storing, "Sunny.")
    second = (await events_of(storing, conversation={"id": made.id}, tools=[WEATHER], input=[result]))[-1]["response"]
    prompt = prompt_of(storing)
    grown = await items_of(storing, made.id)
    assert grown[: len(items)] == items
    assert [item["type"] for item in grown[len(items) :]] == ["function_call_output", "message"]
    # The stored response and the conversation have the same items.
    listed = (await storing.http.get(f"{RESPONSES}/{second['id']}/input_items?order=asc")).json()["data"]
    assert [item["id"] for item in listed] == [item["id"] for item in grown[:-1]]
    assert grown[-1] == second["output"][0]
    await respond(storing, tools=[WEATHER], input=grown[:-1])
    assert prompt_of(storing) == prompt
    counted = await storing.http.post(
        f"{RESPONSES}/input_tokens", json={"model": "base", "conversation": made.id, "input": "Hi"}
    )
    assert counted.status_code == 200
    assert await items_of(storing, made.id) == grown


async def test_response_in_the_background_extends_its_conversation(storing: Gateway) -> None:
    made = await storing.openai.conversations.create()
    begun = await respond(storing, conversation=made.id, background=True, input="How is Rome?")
    found = await finished(storing, begun)
    assert found["conversation"] == {"id": made.id}
    items = await items_of(storing, made.id)
    listed = (await storing.http.get(f"{RESPONSES}/{begun['id']}/input_items?order=asc")).json()["data"]
    assert items == [*listed, *found["output"]]
    [event] = await settled(storing)
    assert event.completion_tokens == found["usage"]["output_tokens"]


async def test_response_that_is_cancelled_too_late_adds_nothing(
    storing: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, finish = await storing.openai.conversations.create(), BackgroundStore.finish

    def cancelled_before(store: BackgroundStore, stored: Any, *rest: Any) -> str | None:
        store.cancel(stored)
        return finish(store, stored, *rest)

    monkeypatch.setattr(BackgroundStore, "finish", cancelled_before)
    found = await finished(storing, await respond(storing, conversation=made.id, background=True, input="Hi"))
    assert (found["status"], found["conversation"]) == ("cancelled", {"id": made.id})
    assert await items_of(storing, made.id) == []


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
async def test_response_in_the_background_outlives_its_conversation(
    storing: Gateway, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    made, finish = await storing.openai.conversations.create(), BackgroundStore.finish
    calls: list[str] = []

    def deleted_before(store: BackgroundStore, stored: Any, *rest: Any) -> str | None:
        if not calls:
            conversations = storing.services.stored.conversations
            conversations.delete(conversations.get(storing.tenant.id, made.id))  # type: ignore[arg-type]
        calls.append(stored.state)
        return finish(store, stored, *rest)

    monkeypatch.setattr(BackgroundStore, "finish", deleted_before)
    asked: dict[str, Any] = {"conversation": made.id, "background": True, "input": "Hi"}
    if is_streamed:
        found = (await events_of(storing, **asked))[-1]["response"]
    else:
        found = await finished(storing, await respond(storing, **asked))
    assert (found["status"], found["conversation"]) == ("completed", None)
    assert (await storing.http.get(f"{RESPONSES}/{found['id']}")).json() == found
    assert len(calls) == 2
    [event] = await settled(storing)
    assert event.completion_tokens == found["usage"]["output_tokens"]


async def test_failed_response_adds_nothing(storing: Gateway) -> None:
    made = await storing.openai.conversations.create()
    answers(storing, "one two", error="nan_logits")
    response = await storing.http.post(RESPONSES, json={"model": "base", "input": "Hi", "conversation": made.id})
    assert response.status_code >= 400
    assert await items_of(storing, made.id) == []


async def test_items_of_conversations_can_be_referred_to(storing: Gateway) -> None:
    made = await storing.openai.conversations.create(items=[QUESTION])
    [question] = await items_of(storing, made.id)
    reference = {"type": "item_reference", "id": question["id"]}
    await respond(storing, input=[reference])
    prompt = prompt_of(storing)
    await respond(storing, input=[QUESTION])
    assert prompt_of(storing) == prompt
    # An item that the conversation already has is not added twice.
    await respond(storing, conversation=made.id, input=[reference, {"role": "user", "content": "And Oslo?"}])
    assert [item["role"] for item in await items_of(storing, made.id)] == ["user", "user", "assistant"]
    headers = {"authorization": f"Bearer {storing.key_of('other')}"}
    refused = await storing.http.post(RESPONSES, json={"model": "base", "input": [reference]}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "item_not_found")


async def test_conversations_of_others_look_like_unknown_ones(storing: Gateway) -> None:
    made = await storing.openai.conversations.create(items=[question("msg_1")])
    other = storing.key_of("other")
    for conversation_id in (made.id, "conv_unknown", "x" * 100, "%00", "%C3%A9"):
        for path, method, body in (
            ("", "GET", None),
            ("", "POST", {"metadata": {}}),
            ("", "DELETE", None),
            ("/items", "GET", None),
            ("/items", "POST", {"items": [QUESTION]}),
            ("/items/msg_1", "GET", None),
            ("/items/msg_1", "DELETE", None),
        ):
            assert await status_of(storing, f"/{conversation_id}{path}", method, other, body) == MISSING
    refused = []
    for conversation_id in (made.id, "conv_unknown", "x" * 100, "\x00", "é", ""):
        sent = {"model": "base", "input": "Hi", "conversation": conversation_id}
        response = await storing.http.post(RESPONSES, json=sent, headers={"authorization": f"Bearer {other}"})
        refused.append((response.status_code, response.json()))
    assert refused == [refused[0]] * 6
    assert (refused[0][0], refused[0][1]["error"]["code"]) == MISSING
    assert len(await items_of(storing, made.id)) == 1


async def test_limited_key_sees_only_the_conversations_of_its_adapters(storing: Gateway) -> None:
    adapter_id = storing.add_adapter("acme", "support")
    limited = storing.services.callers.api_keys.create(storing.tenant.id, "limited", adapters=[adapter_id]).secret
    made = await storing.openai.conversations.create()
    await respond(storing, conversation=made.id, model="support")
    assert (await status_of(storing, f"/{made.id}/items", key=limited))[0] == 200
    await respond(storing, conversation=made.id)
    assert await status_of(storing, f"/{made.id}/items", key=limited) == MISSING


async def test_limited_key_sees_no_conversation_that_refers_to_items_of_other_models(storing: Gateway) -> None:
    adapter_id = storing.add_adapter("acme", "support")
    limited = storing.services.callers.api_keys.create(storing.tenant.id, "limited", adapters=[adapter_id]).secret
    for model, expected in (("support", 200), ("base", 404)):
        made = await storing.openai.conversations.create()
        item_id = (await respond(storing, model=model))["output"][0]["id"]
        reference = {"type": "item_reference", "id": item_id}
        await respond(storing, conversation=made.id, model="support", input=[reference])
        assert (await status_of(storing, f"/{made.id}/items", key=limited))[0] == expected


@pytest.mark.parametrize(("key", "days"), [(None, 30), (KEY, 0)], ids=["no-key", "no-days"])
async def test_conversations_need_storage(
    accounts: Database,
    tool_tokenizer: ModelTokenizer,
    threads: ThreadPoolExecutor,
    anyio_backend: str,
    key: bytes | None,
    days: int,
) -> None:
    async with open_gateway(accounts, tool_tokenizer, threads, GatewaySettings(response_key=key)) as gateway:
        allow(accounts, gateway.tenant.id, days)
        assert await status_of(gateway, "", "POST", body={}) == (400, "storage_not_allowed")


async def test_conversation_says_if_it_could_not_be_extended(storing: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await storing.openai.conversations.create()

    def fail(*_: Any) -> bool:
        raise OperationalError("insert", {}, Exception("the disk is full"))

    monkeypatch.setattr(ConversationStore, "adding", fail)
    response = await respond(storing, conversation=made.id)
    assert (response["status"], response["conversation"], response["store"]) == ("completed", None, True)


async def test_content_is_encrypted_expires_and_is_swept(storing: Gateway) -> None:
    made = await storing.openai.conversations.create(metadata={"name": "Hidden"}, items=[question("Named")])
    kept = await storing.openai.conversations.create()
    await respond(storing, conversation=made.id)
    conversations, items = schema.conversations, schema.conversation_items
    with storing.database.write() as connection:
        rows = [*connection.execute(select(conversations)), *connection.execute(select(items))]
        expired = update(conversations).where(conversations.c.id == made.id)
        connection.execute(expired.values(expires_us=storing.database.now_us(connection)))
    assert len(rows) == 5
    for hidden in ("Secret", "Hidden", "Rome", "Named"):
        assert hidden not in repr(rows)
    assert await status_of(storing, f"/{made.id}") == MISSING
    assert ExpiredRows(storing.database).sweep()["conversations"] == 1
    with storing.database.read() as connection:
        assert connection.execute(select(func.count()).select_from(items)).scalar_one() == 0
    assert (await status_of(storing, f"/{kept.id}"))[0] == 200


async def test_limits_are_named(storing: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    full = (400, "conversation_full")
    made = await storing.openai.conversations.create(items=[QUESTION])
    items = {"items": [QUESTION] * 2}
    with monkeypatch.context() as patch:
        patch.setattr(conversation_store, "MAX_ITEMS", 2)
        assert await status_of(storing, f"/{made.id}/items", "POST", body=items) == full
    with monkeypatch.context() as patch:
        patch.setattr(conversation_store, "MAX_BYTES", 200)
        assert await status_of(storing, f"/{made.id}/items", "POST", body=items) == full
    with monkeypatch.context() as patch:
        patch.setattr(conversation_store, "MAX_TOTAL_BYTES", 200)
        assert await status_of(storing, f"/{made.id}/items", "POST", body=items) == full
    with monkeypatch.context() as patch:
        patch.setattr(conversation_store, "MAX_CONVERSATIONS", 1)
        assert await status_of(storing, "", "POST", body={}) == full
    assert len(await items_of(storing, made.id)) == 1
    with storing.database.write() as connection:
        connection.execute(update(schema.conversations).values(num_items=4095))
    response = await storing.http.post(RESPONSES, json={"model": "base", "input": "Hi", "conversation": made.id})
    assert (response.status_code, response.json()["error"]["code"]) == full
    assert storing.usage() == []
