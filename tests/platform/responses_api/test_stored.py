from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from loramux.admin.serving.expired_rows import ExpiredRows
from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.generation.settler import Settler
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.requests.services import GatewaySettings
from loramux.platform.responses_api import response_input
from loramux.platform.responses_api.stored_items import read_items
from loramux.platform.stored_responses.response_store import ResponseStore, StoredResponse, sealed_content
from loramux.platform.stored_responses.sealing import MAX_CONTENT_BYTES, Sealing
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.gateways import Gateway, open_gateway
from tests.platform.openai_api.test_tools import prompt_of
from tests.platform.responses_api.test_events import CALL, WEATHER
from tests.platform.responses_api.transcripts import RESPONSES, events_of
from tests.platform.storing import KEY, allow, answers

pytestmark = pytest.mark.anyio


async def respond(gateway: Gateway, **body: Any) -> dict[str, Any]:
    response = await gateway.http.post(RESPONSES, json={"model": "base", "input": "Hi", **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


async def status_of(gateway: Gateway, path: str, method: str = "GET", key: str | None = None) -> tuple[int, str | None]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    response = await gateway.http.request(method, f"{RESPONSES}/{path}", headers=headers)
    return response.status_code, (response.json().get("error") or {}).get("code")


MISSING = (404, "response_not_found")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_stored_response_is_retrieved_until_it_is_deleted(storing: Gateway, is_streamed: bool) -> None:
    if is_streamed:
        events = await events_of(storing)
        assert events[0]["response"]["store"]
        made = events[-1]["response"]
    else:
        made = await respond(storing)
    assert made["store"]
    found = await storing.openai.responses.retrieve(made["id"])
    assert found.to_dict() == made
    await storing.openai.responses.delete(made["id"])
    assert await status_of(storing, made["id"]) == MISSING
    assert await status_of(storing, made["id"], "DELETE") == MISSING


@pytest.mark.parametrize(
    ("key", "days", "asked"), [(None, 30, True), (KEY, 0, True), (KEY, 30, False)], ids=["no-key", "no-days", "refused"]
)
async def test_response_is_not_stored_unless_all_agree(
    accounts: Database,
    tool_tokenizer: ModelTokenizer,
    threads: ThreadPoolExecutor,
    anyio_backend: str,
    key: bytes | None,
    days: int,
    asked: bool,
) -> None:
    settings = GatewaySettings(response_key=key)
    async with open_gateway(accounts, tool_tokenizer, threads, settings) as gateway:
        allow(accounts, gateway.tenant.id, days)
        answers(gateway, "Hi")
        made = await respond(gateway, store=asked)
        assert not made["store"]
        assert await status_of(gateway, made["id"]) == MISSING


async def test_previous_response_continues_the_conversation(storing: Gateway) -> None:
    answers(storing, f"<think>\nWell</think>\n\nLook.\n{CALL}")
    first = await respond(storing, instructions="Only once", tools=[WEATHER], input="How is Rome?")
    call = first["output"][-1]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    answers(storing, "Sunny.")
    second = await respond(storing, previous_response_id=first["id"], tools=[WEATHER], input=[result])
    prompt = prompt_of(storing)
    assert second["previous_response_id"] == first["id"]
    given = [{"role": "user", "content": "How is Rome?"}, *first["output"], result]
    await respond(storing, tools=[WEATHER], input=given)
    assert prompt_of(storing) == prompt
    assert "Only once" not in prompt
    # The first response is not needed any more.
    await storing.openai.responses.delete(first["id"])
    await respond(storing, previous_response_id=second["id"], input="And Oslo?")
    prompt = prompt_of(storing)
    assert [text in prompt for text in ("How is Rome?", "sunny", "Sunny.", "And Oslo?")] == [True] * 4


async def test_input_items_are_listed_in_pages(storing: Gateway) -> None:
    given: list[Any] = [{"role": "user", "content": text, "id": f"msg_{text}"} for text in "abc"]
    made = await respond(storing, input=given)
    page = await storing.openai.responses.input_items.list(made["id"], limit=2)
    assert [item.id async for item in page] == ["msg_c", "msg_b", "msg_a"]
    first = await storing.http.get(f"{RESPONSES}/{made['id']}/input_items?limit=2&order=asc")
    assert (first.json()["first_id"], first.json()["last_id"], first.json()["has_more"]) == ("msg_a", "msg_b", True)
    assert first.json()["data"][0]["content"] == [{"type": "input_text", "text": "a"}]
    for query in ("limit=0", "limit=101", "order=up", "after=msg_x"):
        response = await storing.http.get(f"{RESPONSES}/{made['id']}/input_items?{query}")
        assert response.status_code == 400, query
    assert await status_of(storing, "resp_unknown/input_items") == MISSING


async def test_responses_of_others_look_like_unknown_ones(storing: Gateway) -> None:
    made, other = await respond(storing), storing.key_of("other")
    for path in (made["id"], f"{made['id']}/input_items"):
        assert await status_of(storing, path, key=other) == MISSING
    assert await status_of(storing, made["id"], "DELETE", other) == MISSING
    headers = {"authorization": f"Bearer {other}"}
    missing = []
    for previous in (made["id"], "resp_unknown", "x" * 100, "\x00"):
        body = {"model": "base", "input": "Hi", "previous_response_id": previous}
        response = await storing.http.post(RESPONSES, json=body, headers=headers)
        missing.append((response.status_code, response.json()))
    assert missing == [missing[0]] * 4
    assert missing[0][1]["error"]["code"] == "previous_response_not_found"
    assert (await status_of(storing, made["id"]))[0] == 200


async def test_limited_key_sees_only_the_responses_of_its_adapters(storing: Gateway) -> None:
    adapter_id = storing.add_adapter("acme", "support")
    of_adapter, of_base = await respond(storing, model="support"), await respond(storing)
    keys = storing.services.callers.api_keys
    limited = keys.create(storing.tenant.id, "limited", adapters=[adapter_id]).secret
    assert (await status_of(storing, of_adapter["id"], key=limited))[0] == 200
    assert await status_of(storing, of_base["id"], key=limited) == MISSING


@pytest.mark.parametrize("how", ["continued", "referred to", "conversation"])
async def test_limited_key_sees_no_response_to_which_another_model_has_contributed(storing: Gateway, how: str) -> None:
    adapter_id = storing.add_adapter("acme", "support")
    limited = storing.services.callers.api_keys.create(storing.tenant.id, "limited", adapters=[adapter_id]).secret

    async def continued(model: str) -> str:
        """The ID of the adapter's response after one of the model."""
        conversation: dict[str, Any] = {}
        if how == "conversation":
            made = await storing.http.post("/v1/conversations", json={})
            conversation = {"conversation": made.json()["id"]}
        first = await respond(storing, model=model, **conversation)
        match how:
            case "continued":
                sent: dict[str, Any] = {"previous_response_id": first["id"]}
            case "referred to":
                sent = {"input": referring(first["output"][0]["id"])}
            case _:
                sent = conversation
        return str((await respond(storing, model="support", **sent))["id"])

    assert (await status_of(storing, await continued("support"), key=limited))[0] == 200
    mixed = await continued("base")
    assert (await status_of(storing, mixed))[0] == 200
    for path in (mixed, f"{mixed}/input_items"):
        assert await status_of(storing, path, key=limited) == MISSING
    last = await respond(storing, model="support", previous_response_id=mixed)
    assert await status_of(storing, last["id"], key=limited) == MISSING


@pytest.mark.parametrize(("earlier", "others"), [((), []), (("ada_1",), []), (("ada_1", None), [None])])
def test_row_names_only_other_earlier_models(earlier: tuple[str | None, ...], others: list[str | None]) -> None:
    stored = StoredResponse(
        id="resp_1", tenant_id="ten_1", adapter_id="ada_1", input=[], response={}, earlier_adapter_ids=earlier
    )
    sealing = Sealing(b"a key of at least 32 characters.")
    # Servers of earlier versions cannot read a row with a further field.
    expected: dict[str, Any] = {"input": [], "response": {}}
    if others:
        expected["earlier_adapter_ids"] = others
    assert sealing.open("ten_1", "resp_1", sealed_content(sealing, stored)) == expected


async def test_content_is_encrypted_and_bound_to_its_tenant_and_id(storing: Gateway) -> None:
    made = await respond(storing)
    table = schema.responses
    with storing.database.read() as connection:
        row = connection.execute(select(table)).one()
    assert b"Secret" not in row.content
    store = ResponseStore(storing.database, Sealing(KEY))
    found = store.get(storing.tenant.id, made["id"])
    assert found is not None
    assert found.response == made
    assert ResponseStore(storing.database, Sealing(b"another key")).get(storing.tenant.id, made["id"]) is None
    assert ResponseStore(storing.database, Sealing(None)).get(storing.tenant.id, made["id"]) is None
    with storing.database.write() as connection:
        connection.execute(update(table).values(id="resp_moved"))
    assert store.get(storing.tenant.id, "resp_moved") is None


async def test_response_expires_and_is_swept(storing: Gateway) -> None:
    made, kept = await respond(storing), await respond(storing)
    table = schema.responses
    with storing.database.write() as connection:
        now_us = storing.database.now_us(connection)
        connection.execute(update(table).where(table.c.id == made["id"]).values(expires_us=now_us))
    assert await status_of(storing, made["id"]) == MISSING
    assert ExpiredRows(storing.database).sweep()["responses"] == 1
    assert (await status_of(storing, kept["id"]))[0] == 200


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_response_is_stored_although_its_client_leaves_while_it_is_settled(
    storing: Gateway, monkeypatch: pytest.MonkeyPatch, is_streamed: bool
) -> None:
    settle = Settler.settle

    async def settle_late(self: Settler, request_id: str, settlement: Settlement) -> None:
        for generation in storing.services.run.requests._tasks.values():
            generation.abandon()
        await settle(self, request_id, settlement)

    monkeypatch.setattr(Settler, "settle", settle_late)
    answer = await storing.http.post(RESPONSES, json={"model": "base", "input": "Hi", "stream": is_streamed})
    assert answer.status_code == 200
    assert [event.status for event in storing.usage()] == ["completed"]
    with storing.database.read() as connection:
        [response_id] = connection.scalars(select(schema.responses.c.id))
    assert await status_of(storing, response_id) == (200, None)


async def test_too_long_response_is_not_stored(storing: Gateway) -> None:
    made = await respond(storing)
    store = storing.services.stored.responses
    stored = store.get(storing.tenant.id, made["id"])
    assert stored is not None
    # Random hexadecimal digits cannot be compressed to less than half.
    long = [{"text": random.Random(0).randbytes(MAX_CONTENT_BYTES).hex()}]
    assert not store.put(replace(stored, id="resp_long", input=long), 1)


@pytest.mark.parametrize("kind", [OperationalError, IntegrityError], ids=["disk", "tenant-deleted-meanwhile"])
async def test_failing_database_only_costs_the_storage(
    storing: Gateway, monkeypatch: pytest.MonkeyPatch, kind: type[DBAPIError]
) -> None:
    def fail(*_: Any) -> bool:
        raise kind("insert", {}, Exception("it failed"))

    monkeypatch.setattr(ResponseStore, "put", fail)
    made = await respond(storing)
    assert (made["status"], made["store"]) == ("completed", False)
    assert not (await events_of(storing))[-1]["response"]["store"]


async def test_streams_cannot_be_resumed(storing: Gateway) -> None:
    made = await respond(storing)
    assert await status_of(storing, f"{made['id']}?stream=true&starting_after=900") == (400, "unsupported_parameter")


NO_ITEM = (
    404,
    {
        "message": "no stored response or conversation has such an item: send the item itself. Set store: false in "
        "clients that refer to all earlier items, such as Vercel's AI SDK",
        "type": "invalid_request_error",
        "param": "input[0].id",
        "code": "item_not_found",
    },
)


def referring(item_id: str) -> list[Any]:
    return [{"type": "item_reference", "id": item_id}, {"role": "user", "content": "Again"}]


async def test_references_stand_for_the_items_of_stored_responses(storing: Gateway) -> None:
    answers(storing, f"<think>\nWell</think>\n\nLook.\n{CALL}")
    first = await respond(storing, tools=[WEATHER], input="How is Rome?")
    [question] = (await storing.http.get(f"{RESPONSES}/{first['id']}/input_items")).json()["data"]
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "sunny"}
    items = [question, *first["output"]]
    references = [{"type": "item_reference", "id": items[0]["id"]}, *({"id": item["id"]} for item in items[1:])]
    answers(storing, "Sunny.")
    second = await respond(storing, tools=[WEATHER], input=[*references, result])
    prompt = prompt_of(storing)
    await respond(storing, tools=[WEATHER], input=[*items, result])
    assert prompt_of(storing) == prompt
    # The stored input has the items themselves, and each keeps its ID.
    listed = (await storing.http.get(f"{RESPONSES}/{second['id']}/input_items?order=asc")).json()["data"]
    assert [item["id"] for item in listed[:-1]] == [item["id"] for item in items]
    await respond(storing, input=referring(listed[-1]["id"]), previous_response_id=second["id"])
    # Items of a deleted response can still be named by a request that continues after it.
    await storing.openai.responses.delete(first["id"])
    assert await refused_reference(storing, items[1]["id"]) == NO_ITEM
    await respond(storing, input=referring(items[1]["id"]), previous_response_id=second["id"])


async def test_a_request_that_continues_needs_no_input(storing: Gateway) -> None:
    first = await respond(storing, input="How is Rome?")
    conversation = await storing.openai.conversations.create(items=[{"role": "user", "content": "How is Rome?"}])
    for continued in ({"previous_response_id": first["id"]}, {"conversation": conversation.id, "input": []}):
        response = await storing.http.post(RESPONSES, json={"model": "base", **continued})
        assert response.status_code == 200, response.text
        assert "How is Rome?" in prompt_of(storing)
    empty = await storing.openai.conversations.create()
    for body in ({}, {"conversation": empty.id}):
        response = await storing.http.post(RESPONSES, json={"model": "base", **body})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "input")


async def test_an_item_counts_as_often_as_it_is_named(storing: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await respond(storing, input="How is Rome?")
    references = [{"type": "item_reference", "id": first["output"][0]["id"]}] * 20
    monkeypatch.setattr(response_input, "MAX_BYTES", 1000)
    refused = await storing.http.post(RESPONSES, json={"model": "base", "input": references})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    await respond(storing, input=[*references[:1], {"role": "user", "content": "Again"}])


async def test_only_objects_whose_items_are_missing_count(storing: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients such as Vercel's AI SDK send a reference for each earlier item, and each answer is another response."""
    monkeypatch.setattr(response_input, "MAX_REFERENCED", 1)
    given: list[Any] = []
    for number in range(3):
        question = {"role": "user", "content": f"Question {number}?"}
        made = await respond(storing, input=[*given, question])
        listed = (await storing.http.get(f"{RESPONSES}/{made['id']}/input_items?order=asc")).json()["data"]
        given = [{"type": "item_reference", "id": item["id"]} for item in [*listed, *made["output"]]]
    assert len(given) == 6
    other = await respond(storing)
    unrelated = {"type": "item_reference", "id": other["output"][0]["id"]}
    response = await storing.http.post(RESPONSES, json={"model": "base", "input": [*given, unrelated]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "input")


async def test_no_more_items_are_read_once_they_are_too_long(storing: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [await respond(storing, input="x" * 600) for _ in range(3)]
    read = list[Any]()

    def noted(items: list[Any]) -> list[Any]:
        read.append(items)
        return read_items(items)

    monkeypatch.setattr(response_input, "read_items", noted)
    monkeypatch.setattr(response_input, "MAX_BYTES", 1000)
    named = [(await storing.http.get(f"{RESPONSES}/{one['id']}/input_items")).json()["data"][0] for one in made]
    references = [{"type": "item_reference", "id": item["id"]} for item in named]
    refused = await storing.http.post(RESPONSES, json={"model": "base", "input": references})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert len(read) == 2


async def refused_reference(gateway: Gateway, item_id: str, **sent: Any) -> tuple[int, dict[str, Any]]:
    response = await gateway.http.post(RESPONSES, json={"model": "base", "input": referring(item_id)}, **sent)
    return response.status_code, response.json()["error"]


async def test_references_to_unknown_and_foreign_items_get_the_same_error(storing: Gateway) -> None:
    made = await respond(storing)
    known = made["output"][0]["id"]
    foreign = {"headers": {"authorization": f"Bearer {storing.key_of('other')}"}}
    adapter_id = storing.add_adapter("acme", "support")
    key = storing.services.callers.api_keys.create(storing.tenant.id, "limited", adapters=[adapter_id]).secret
    limited = {"headers": {"authorization": f"Bearer {key}"}}
    for sent in (foreign, limited):
        assert await refused_reference(storing, known, **sent) == NO_ITEM
    for unknown in (f"{known[:-1]}x", "msg_1", "", "_", "\x00" * 40, "é" * 64, f"msg_{'0' * 48}"):
        assert await refused_reference(storing, unknown) == NO_ITEM, unknown
    counted = await storing.http.post(f"{RESPONSES}/input_tokens", json={"model": "base", "input": referring(known)})
    assert counted.status_code == 200


async def test_full_storage_refuses_what_is_asked_for_and_answers_the_rest(storing: Gateway) -> None:
    conversation = await storing.openai.conversations.create()
    storing.limit("stored_bytes", 1)
    asked: list[dict[str, Any]] = [{"store": True}, {"background": True}, {"conversation": conversation.id}]
    for body in asked:
        response = await storing.http.post(RESPONSES, json={"model": "base", "input": "Hi", **body})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (429, "insufficient_quota", "stored_bytes")
        assert response.headers["x-loramux-quota-policy"]
    assert storing.usage() == []
    # By default, it would be stored.
    assert not (await respond(storing))["store"]
    for path, body in (("", {}), (f"/{conversation.id}/items", {"items": [{"role": "user", "content": "Hi"}]})):
        response = await storing.http.post(f"/v1/conversations{path}", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (429, "stored_bytes")
    storing.limit("stored_bytes", 100_000)
    assert (await respond(storing, store=True))["store"]


async def test_conversation_that_does_not_fit_is_not_made(storing: Gateway) -> None:
    storing.limit("stored_bytes", 20)
    body = {"metadata": {}, "items": [{"role": "user", "content": "longer than the limit"}]}
    response = await storing.http.post("/v1/conversations", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (429, "stored_bytes")
    with storing.database.read() as connection:
        assert connection.execute(select(schema.conversations)).all() == []
