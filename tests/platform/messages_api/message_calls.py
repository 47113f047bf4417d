"""Calls of the Messages API for tests, with the gateway's scripted engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx

from tests.platform.gateways import Gateway
from tests.platform.scripted_engine import Script

HEADERS = {"anthropic-version": "2023-06-01"}
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather in Rome?"}]
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather now.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def answers(gateway: Gateway, *texts: str, cached_tokens: int = 0) -> int:
    """Let the engine answer with these texts, each at once. Return the number of their tokens."""
    token_ids = [gateway.services.prompts.tokenizer.encode(text)[1:] for text in texts]
    script = Script(token_ids=tuple(one for ids in token_ids for one in ids), cached_tokens=cached_tokens)
    gateway.engine.script = lambda add: script
    return len(script.token_ids)


def prompt_of(gateway: Gateway) -> str:
    tokenizer = gateway.services.prompts.tokenizer
    return b"".join(tokenizer.token_bytes(token) for token in gateway.engine.adds[-1].prompt).decode()


async def post(gateway: Gateway, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    body = {"model": "base", "max_tokens": 200, "messages": ASKED, **fields}
    sent = {name: value for name, value in body.items() if value is not ...}
    return await gateway.http.post(path, json=sent, headers=HEADERS)


async def message(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    response = await post(gateway, **fields)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def events_of(gateway: Gateway, **fields: Any) -> list[dict[str, Any]]:
    response = await post(gateway, stream=True, **fields)
    assert response.status_code == 200, response.text
    return decoded(response.text)


def decoded(text: str) -> list[dict[str, Any]]:
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def kinds(events: Sequence[dict[str, Any]]) -> list[str]:
    """The events' types, with those of deltas, and without repetitions."""
    found: list[str] = []
    for event in events:
        kind = event.get("delta", {}).get("type", event["type"])
        if found[-1:] != [kind]:
            found.append(kind)
    return found


def same(message: dict[str, Any]) -> dict[str, Any]:
    """The message without the parts that differ in each answer."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


def joined(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream."""
    made: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for event in events:
        match event:
            case {"type": "message_start", "message": first}:
                made = first
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(made["content"])
                made["content"].append(block)
            case {"type": "content_block_delta", "index": index, "delta": {"partial_json": text}}:
                inputs[index] = inputs.get(index, "") + text
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                for name in delta.keys() - {"type"}:
                    made["content"][index][name] += delta[name]
            case {"type": "content_block_stop", "index": index} if index in inputs:
                made["content"][index]["input"] = json.loads(inputs[index])
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                made |= delta
                made["usage"] |= usage
    return made
