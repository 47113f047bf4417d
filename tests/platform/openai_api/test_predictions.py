"""OpenAI's predicted outputs, and the field that turns drafts off."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import select

from loramux.engine.scheduling.request_limits import MAX_PREDICTION_TOKENS
from loramux.migrations import schema
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

ASKED: dict[str, Any] = {"model": "base", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}


async def answer(gateway: Any, **fields: Any) -> dict[str, Any]:
    response = await gateway.http.post("/v1/chat/completions", json={**ASKED, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def prediction_of(content: Any) -> dict[str, Any]:
    return {"prediction": {"type": "content", "content": content}}


@pytest.mark.parametrize(
    "content", ["one two", [{"type": "text", "text": "one"}, {"type": "text", "text": " two"}]], ids=["text", "parts"]
)
async def test_the_engine_gets_the_tokens_of_the_prediction(gateway: Any, tokenizer: Any, content: Any) -> None:
    await answer(gateway, **prediction_of(content))
    await answer(gateway, n=2, **prediction_of(content))
    without = await answer(gateway, n=2)
    assert [add.prediction for add in gateway.engine.adds[:3]] == [tokenizer.encode("one two")[1:], (), ()]
    assert [add.prediction for add in gateway.engine.adds[3:]] == [()] * 2
    # The prediction is no part of the prompt.
    assert gateway.engine.adds[0].prompt == gateway.engine.adds[2].prompt
    assert "completion_tokens_details" not in without["usage"]


async def test_usage_reports_the_prediction_and_charges_only_the_answer(gateway: Any, tokenizer: Any) -> None:
    gateway.engine.script = lambda add: Script(token_ids=tokenizer.encode("abcdef")[1:7], predicted=(4, 3))
    usage = (await answer(gateway, **prediction_of("abcdef")))["usage"]
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 4, "rejected_prediction_tokens": 3}
    [event] = await settled(gateway)
    assert event.completion_tokens == usage["completion_tokens"] == 6
    assert event.prompt_tokens == usage["prompt_tokens"]


async def settled(gateway: Any) -> list[Any]:
    with gateway.database.read() as connection:
        return list(connection.execute(select(schema.usage_events)).all())


async def test_tokens_after_a_stop_string_are_not_accepted(gateway: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("abcdef")[1:]
    gateway.engine.script = lambda add: Script(token_ids=ids, tokens_per_output=len(ids), predicted=(len(ids), 1))
    usage = (await answer(gateway, stop=["a"], **prediction_of("abcdef")))["usage"]
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] <= usage["completion_tokens"]
    assert sum(details.values()) == len(ids) + 1


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        ({"content": "x"}, "prediction.type"),
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": None}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": [5]}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": {}}]}, "prediction.content"),
        ({"type": "content", "content": "\ud800"}, None),
        ({"type": "content", "content": "x" * (4 * MAX_PREDICTION_TOKENS + 1)}, "prediction.content"),
        ({"type": "content", "content": "x", "more": 1}, "prediction.more"),
    ],
    ids=[
        "no object",
        "no type",
        "other type",
        "no content",
        "null",
        "number",
        "no part",
        "image",
        "surrogate",
        "huge",
        "extra",
    ],
)
async def test_hostile_predictions_are_refused(gateway: Any, prediction: Any, param: str | None) -> None:
    content = json.dumps({**ASKED, "prediction": prediction})
    headers = {"content-type": "application/json"}
    response = await gateway.http.post("/v1/chat/completions", content=content, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert gateway.engine.adds == []


async def test_special_tokens_and_an_empty_text_are_no_harm(gateway: Any) -> None:
    await answer(gateway, **prediction_of("<|bos|><|end|>"))
    await answer(gateway, **prediction_of(""))
    await answer(gateway, **prediction_of([]))
    assert [len(add.prediction) for add in gateway.engine.adds][1:] == [0, 0]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", ASKED), ("/v1/completions", {"model": "base", "prompt": "Hello", "max_tokens": 8})],
    ids=["chat", "completions"],
)
async def test_a_request_can_turn_drafts_off(gateway: Any, path: str, body: dict[str, Any]) -> None:
    for value in (False, True, None):
        response = await gateway.http.post(path, json={**body, "speculation": value})
        assert response.status_code == 200, response.text
    assert [add.speculates for add in gateway.engine.adds] == [False, True, True]
    response = await gateway.http.post(path, json={**body, "speculation": "no"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "speculation")
