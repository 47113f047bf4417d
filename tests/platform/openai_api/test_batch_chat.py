"""Several conversations in one chat request."""

from __future__ import annotations

from typing import Any

import pytest

from tests.platform.gateways import Gateway
from tests.platform.openai_api.test_bad_input import refused
from tests.platform.openai_api.test_request_fields import CHAT, answer_of
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

PATH = f"{CHAT}/batch"
TEXTS = ("Hello", "Good day", "What is a parcel?")


def conversation(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def batch(*texts: str, **fields: Any) -> dict[str, Any]:
    return {"model": "base", "messages": [conversation(text) for text in texts], **fields}


async def test_each_conversation_is_answered_as_if_it_were_alone(gateway: Gateway) -> None:
    alone = [await answer_of(gateway, CHAT, text, max_tokens=5, logprobs=True) for text in TEXTS]
    prompts = [add.prompt for add in gateway.engine.adds]
    response = await gateway.http.post(PATH, json=batch(*TEXTS, max_tokens=5, logprobs=True))
    assert response.status_code == 200, response.text
    together = response.json()
    assert [add.prompt for add in gateway.engine.adds[len(TEXTS) :]] == prompts
    assert together.keys() == alone[0].keys()
    assert together["choices"] == [{**one["choices"][0], "index": index} for index, one in enumerate(alone)]
    assert together["prompt_token_ids"] is None
    for kind in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert together["usage"][kind] == sum(one["usage"][kind] for one in alone)
    event = gateway.usage()[-1]
    assert (event.endpoint, event.prompt_tokens) == ("chat", together["usage"]["prompt_tokens"])
    assert event.completion_tokens == together["usage"]["completion_tokens"]


async def test_choices_are_in_the_order_of_the_conversations(gateway: Gateway) -> None:
    response = await gateway.http.post(PATH, json=batch(*TEXTS, n=2, max_tokens=3, return_token_ids=True))
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    adds = gateway.engine.adds
    assert [add.prompt for add in adds] == [adds[index].prompt for index in (0, 0, 2, 2, 4, 4)]
    assert all(choice["token_ids"] for choice in choices)
    assert response.json()["prompt_token_ids"] is None


async def test_each_conversation_echoes_its_own_last_message(gateway: Gateway, tokenizer: Any) -> None:
    gateway.engine.script = lambda add: Script(token_ids=tokenizer.encode(" end")[1:])
    begun = [*conversation("Go on"), {"role": "assistant", "content": "The beginning, the"}]
    fields = {"echo": True, "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 9}
    response = await gateway.http.post(PATH, json={**batch(), "messages": [begun, conversation("Hello")], **fields})
    assert [choice["message"]["content"] for choice in response.json()["choices"]] == ["The beginning, the end", " end"]


async def test_one_schema_constrains_every_answer(gateway: Gateway) -> None:
    await gateway.http.post(PATH, json=batch(*TEXTS, max_tokens=9, response_format={"type": "json_object"}))
    assert len({add.grammar for add in gateway.engine.adds}) == 1
    assert all(add.grammar for add in gateway.engine.adds)
    assert len(gateway.engine.adds) == len(TEXTS)


async def test_answers_that_begin_at_different_places_are_refused(tools: Gateway) -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    messages = [[*conversation("Hot?"), {"role": "assistant", "content": text}] for text in ("<think>Is", "<think>")]
    response = await tools.http.post(PATH, json={**batch(), "messages": messages, **fields, "max_tokens": 2})
    assert response.status_code == 200, response.text
    tools.engine.adds.clear()
    messages[1][-1]["content"] = "<think>Yes.</think>It"
    response = await tools.http.post(PATH, json={**batch(), "messages": messages, **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    assert tools.engine.adds == []


TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [[]]}, "invalid_value", "messages[0]"),
        ({"messages": conversation("Hello")}, "invalid_type", "messages[0]"),
        ({"messages": "Hello"}, "invalid_type", "messages"),
        ({"messages": [conversation("a"), [{"role": "user", "content": "a"}, 5]]}, "invalid_type", "messages[1][1]"),
        ({"messages": [conversation("a")] * 2049}, "invalid_value", "messages"),
        ({"messages": [conversation("a")] * 129}, "invalid_value", "n"),
        ({"messages": [conversation("a")] * 65, "n": 2}, "invalid_value", "n"),
        ({"messages": [conversation("a " * 400)]}, "context_length_exceeded", "messages"),
        ({"stream": True}, "unsupported_parameter", "stream"),
        ({"tools": [TOOL]}, "unsupported_parameter", "tools"),
        ({"prompt_logprobs": 1}, "unsupported_parameter", "prompt_logprobs"),
        ({"use_beam_search": True}, "unsupported_parameter", "use_beam_search"),
        ({"model": "nobody/none"}, "model_not_found", "model"),
    ],
    ids=lambda given: None if isinstance(given, str) else str(given)[:30],
)
async def test_unusable_batch_is_refused(gateway: Gateway, change: dict[str, Any], code: str, param: str) -> None:
    status = 404 if code == "model_not_found" else 400
    await refused(gateway, PATH, status, code, param, json={**batch("Hello"), **change})
