from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from sqlalchemy import select, update
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from loramux.admin.serving.expired_rows import ExpiredRows
from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.requests.services import GatewaySettings
from loramux.platform.stored_responses import chat_store
from loramux.platform.stored_responses.chat_store import ChatStore
from loramux.platform.stored_responses.sealing import Sealing
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.platform.gateways import Gateway, open_gateway
from tests.platform.responses_api.test_events import CALL
from tests.platform.storing import KEY, allow, answers

pytestmark = pytest.mark.anyio

CHATS = "/v1/chat/completions"
MISSING = (404, "chat_completion_not_found")
MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}], "name": "Ann"},
]
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


async def complete(gateway: Gateway, **body: Any) -> ChatCompletion:
    return await gateway.openai.chat.completions.create(
        **{"model": "base", "messages": MESSAGES, "store": True, **body}
    )


async def status_of(gateway: Gateway, path: str, method: str = "GET", key: str | None = None) -> tuple[int, str | None]:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"metadata": {}} if method == "POST" else None
    response = await gateway.http.request(method, f"{CHATS}{path}", headers=headers, json=body)
    return response.status_code, (response.json().get("error") or {}).get("code")


async def test_stored_chat_is_read_changed_and_deleted(storing: Gateway) -> None:
    made = await complete(storing, metadata={"kind": "test"}, seed=7, temperature=0.5)
    chats = storing.openai.chat.completions
    found = await chats.retrieve(made.id)
    shown = found.to_dict()
    assert {name: shown[name] for name in made.to_dict()} == made.to_dict()
    assert [shown[name] for name in ("metadata", "seed", "temperature", "top_p")] == [{"kind": "test"}, 7, 0.5, 1.0]
    changed = await chats.update(made.id, metadata={"kind": "other"})
    assert changed.to_dict() == {**shown, "metadata": {"kind": "other"}}
    assert (await chats.retrieve(made.id)).to_dict() == changed.to_dict()
    deleted = await chats.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "chat.completion.deleted")
    for path, method in ((f"/{made.id}", "GET"), (f"/{made.id}/messages", "GET"), (f"/{made.id}", "DELETE")):
        assert await status_of(storing, path, method) == MISSING
    assert await status_of(storing, f"/{made.id}", "POST") == MISSING


async def test_messages_of_the_request_are_listed(storing: Gateway) -> None:
    made = await complete(storing)
    page = await storing.openai.chat.completions.messages.list(made.id, limit=1)
    found = [message.to_dict() async for message in page]
    assert found == [
        {"id": f"{made.id}-0", "role": "system", "content": "Be brief.", "content_parts": None},
        {
            "id": f"{made.id}-1",
            "role": "user",
            "content": "Hi\nthere",
            "content_parts": MESSAGES[1]["content"],
            "name": "Ann",
        },
    ]
    newest = await storing.openai.chat.completions.messages.list(made.id, order="desc")
    assert [message.id for message in newest.data] == [f"{made.id}-1", f"{made.id}-0"]
    response = await storing.http.get(f"{CHATS}/{made.id}/messages?after=unknown")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "after")


async def test_streamed_chat_is_stored_as_it_was_sent(storing: Gateway) -> None:
    answers(storing, f"<think>\nWell</think>\n\nLook.\n{CALL}")
    stream = await storing.openai.chat.completions.create(
        model="base", messages=MESSAGES, store=True, stream=True, tools=[WEATHER], n=2
    )
    texts, ids, completion_id = ["", ""], [[], []], ""  # type: tuple[list[str], list[list[str | None]], str]
    async for chunk in stream:
        completion_id = chunk.id
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ids[choice.index] += [call.id for call in choice.delta.tool_calls or () if call.id]
    found = await storing.openai.chat.completions.retrieve(completion_id)
    assert [choice.message.content for choice in found.choices] == texts
    assert [[call.id for call in choice.message.tool_calls or ()] for choice in found.choices] == ids
    assert len(ids[0]) == len(ids[1]) == 1
    assert [choice.finish_reason for choice in found.choices] == ["tool_calls"] * 2
    [event] = storing.usage()
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (event.prompt_tokens, event.completion_tokens)
    calls = storing.services.metrics.registry.get_sample_value("loramux_tool_calls_total", {"format": "hermes"})
    assert calls == 2


@pytest.mark.parametrize(
    ("key", "days", "store"), [(None, 30, True), (KEY, 0, True), (KEY, 30, False), (KEY, 30, None)]
)
async def test_chat_is_not_stored_unless_all_agree(
    accounts: Database,
    tool_tokenizer: ModelTokenizer,
    threads: ThreadPoolExecutor,
    anyio_backend: str,
    key: bytes | None,
    days: int,
    store: bool | None,
) -> None:
    settings = GatewaySettings(response_key=key)
    async with open_gateway(accounts, tool_tokenizer, threads, settings) as gateway:
        allow(accounts, gateway.tenant.id, days)
        answers(gateway, "Hi")
        made = await complete(gateway, store=store)
        assert await status_of(gateway, f"/{made.id}") == MISSING
        assert [one async for one in gateway.openai.chat.completions.list()] == []


async def test_chats_are_listed_by_model_and_metadata(storing: Gateway) -> None:
    storing.add_adapter("acme", "support")
    entries = [{"a": "1"}, {"a": "1", "b": "2"}, {}, {"a1": ""}]
    made = [(await complete(storing, metadata=entry)).id for entry in entries]
    of_adapter = (await complete(storing, model="support", metadata=entries[0])).id
    chats = storing.openai.chat.completions

    async def found(**query: Any) -> list[str]:
        return [one.id async for one in chats.list(**query)]

    assert await found() == [*made, of_adapter]
    assert await found(limit=2) == [*made, of_adapter]
    assert await found(order="desc", limit=2) == [of_adapter, *made[::-1]]
    assert await found(after=made[2]) == [made[3], of_adapter]
    assert await found(model="support") == [of_adapter]
    assert await found(metadata={"a": "1"}) == [made[0], made[1], of_adapter]
    assert await found(metadata={"a": "1", "b": "2"}) == [made[1]]
    assert await found(metadata={"a1": ""}) == [made[3]]
    assert await found(metadata={"a": "2"}) == await found(model="\x00") == await found(after="\x00") == []
    await chats.update(made[2], metadata={"b": "2"})
    assert await found(metadata={"b": "2"}) == [made[1], made[2]]
    queries = ("limit=0", "limit=101", "order=up", "metadata=1", "metadata[]=1", f"model={'x' * 201}")
    for query in (*queries, "&".join(f"metadata[{number}]=1" for number in range(65))):
        response = await storing.http.get(f"{CHATS}?{query}")
        assert response.status_code == 400, query


async def test_page_is_bounded_in_bytes(storing: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [(await complete(storing)).id for _ in range(3)]
    monkeypatch.setattr(chat_store, "MAX_PAGE_BYTES", 1)
    page = await storing.openai.chat.completions.list()
    assert ([one.id for one in page.data], page.has_more) == (made[:1], True)
    assert [one.id async for one in page] == made


async def test_chats_of_others_look_like_unknown_ones(storing: Gateway) -> None:
    made, other = await complete(storing), storing.key_of("other")
    for path in (f"/{made.id}", "/chatcmpl-unknown", f"/{'x' * 100}", "/%00", "/%FF"):
        for method in ("GET", "POST", "DELETE"):
            assert await status_of(storing, path, method, other) == MISSING
        assert await status_of(storing, f"{path}/messages", key=other) == MISSING
    response = await storing.http.get(CHATS, headers={"authorization": f"Bearer {other}"})
    assert response.json() == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert (await status_of(storing, f"/{made.id}"))[0] == 200


async def test_limited_key_sees_only_the_chats_of_its_adapters(storing: Gateway) -> None:
    adapter_id = storing.add_adapter("acme", "support")
    of_adapter, of_base = await complete(storing, model="support"), await complete(storing)
    limited = storing.services.callers.api_keys.create(storing.tenant.id, "limited", adapters=[adapter_id]).secret
    assert (await status_of(storing, f"/{of_adapter.id}", key=limited))[0] == 200
    assert await status_of(storing, f"/{of_base.id}", key=limited) == MISSING
    response = await storing.http.get(CHATS, headers={"authorization": f"Bearer {limited}"})
    assert [one["id"] for one in response.json()["data"]] == [of_adapter.id]


async def test_content_and_metadata_are_encrypted(storing: Gateway) -> None:
    made = await complete(storing, metadata={"name": "Hidden"})
    with storing.database.read() as connection:
        row = connection.execute(select(schema.chat_completions)).one()
    for hidden in ("Secret", "Hidden", "brief"):
        assert hidden not in repr(tuple(row))
    for secret in (b"another key", None):
        assert ChatStore(storing.database, Sealing(secret)).get(storing.tenant.id, made.id) is None


async def test_chat_expires_and_is_swept(storing: Gateway) -> None:
    made, kept = await complete(storing), await complete(storing)
    table = schema.chat_completions
    with storing.database.write() as connection:
        now_us = storing.database.now_us(connection)
        connection.execute(update(table).where(table.c.id == made.id).values(expires_us=now_us))
    assert await status_of(storing, f"/{made.id}") == MISSING
    assert [one.id async for one in storing.openai.chat.completions.list()] == [kept.id]
    assert ExpiredRows(storing.database).sweep()["chat_completions"] == 1
    assert (await status_of(storing, f"/{kept.id}"))[0] == 200


@pytest.mark.parametrize("kind", [OperationalError, IntegrityError], ids=["disk", "tenant-deleted-meanwhile"])
async def test_failing_database_only_costs_the_storage(
    storing: Gateway, monkeypatch: pytest.MonkeyPatch, kind: type[DBAPIError]
) -> None:
    def fail(*_: Any) -> bool:
        raise kind("insert", {}, Exception("it failed"))

    monkeypatch.setattr(ChatStore, "put", fail)
    made = await complete(storing)
    assert made.choices[0].message.content == "Secret answer"
    assert await status_of(storing, f"/{made.id}") == MISSING


async def test_update_is_validated(storing: Gateway) -> None:
    made = await complete(storing)
    long = {"text": random.Random(0).randbytes(700_000).hex()}
    for body in (
        {},
        {"metadata": {"a": 1}},
        {"metadata": {}, "model": "x"},
        {"metadata": {str(n): "" for n in range(65)}},
    ):
        response = await storing.http.post(f"{CHATS}/{made.id}", json=body)
        assert response.status_code == 400, body
    assert (await storing.http.post(f"{CHATS}/{made.id}", json={"metadata": long})).status_code == 200
    assert (await storing.http.post(f"{CHATS}/{made.id}", json={"metadata": None})).json()["metadata"] == {}


async def test_full_storage_refuses_chats_that_are_to_be_stored(storing: Gateway) -> None:
    kept = await complete(storing)
    storing.limit("stored_bytes", 1)
    response = await storing.http.post(CHATS, json={"model": "base", "messages": MESSAGES, "store": True})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (429, "insufficient_quota", "stored_bytes")
    noise = random.Random(3).randbytes(200).hex()
    response = await storing.http.post(f"{CHATS}/{kept.id}", json={"metadata": {"a": noise}})
    assert (response.status_code, response.json()["error"]["param"]) == (429, "stored_bytes")
    await complete(storing, store=False)
    assert len(storing.usage()) == 2
    await storing.openai.chat.completions.delete(kept.id)
    storing.limit("stored_bytes", 100_000)
    assert (await storing.openai.chat.completions.retrieve((await complete(storing)).id)).model == "base"
