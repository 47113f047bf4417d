from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from loramux.engine.protocol.messages import Add
from loramux.platform.bodies.chat_request import ChatRequest
from loramux.platform.bodies.generation_request import GenerationRequest
from loramux.platform.openai_api.completion_request import CompletionRequest
from tests.docs.request_fields_page import known_fields

pytestmark = pytest.mark.anyio

ENDPOINTS = pytest.mark.parametrize(
    ("path", "body", "plain"),
    [
        ("/v1/completions", CompletionRequest, {"prompt": "Hello"}),
        ("/v1/chat/completions", ChatRequest, {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
    ids=["completions", "chat"],
)
TOOL = {"type": "function", "function": {"name": "now"}}
VALUES: dict[str, tuple[Any, ...]] = {
    "guided_decoding_backend": ("outlines",),
    "prompt_cache_key": ("a",),
    "prompt_cache_options": ({"mode": "explicit", "ttl": "30m"},),
    "prompt_cache_retention": ("24h",),
    "safety_identifier": ("ann",),
}
"""Values to send for the fields that have no effect. Boolean fields list both."""


def examples(name: str) -> list[dict[str, Any]]:
    if name.startswith("stream_options."):
        return [{"stream": True, "stream_options": {name.partition(".")[2]: value}} for value in (True, False)]
    return [{name: value} for value in VALUES[name]]


@ENDPOINTS
async def test_fields_without_effect_change_neither_the_answer_nor_the_work(
    tools: Any, path: str, body: type[GenerationRequest], plain: dict[str, Any]
) -> None:
    if body is ChatRequest:
        plain = {**plain, "tools": [TOOL]}

    async def outcome(**fields: Any) -> tuple[str, Add]:
        response = await tools.http.post(path, json={"model": "base", "max_tokens": 3, **plain, **fields})
        assert response.status_code == 200, response.text
        text = response.text.replace(response.headers["x-request-id"].removeprefix("req_"), "")
        add = msgspec.structs.replace(tools.engine.adds[-1], sequence_id="")
        return re.sub(r'"created":\d+', "", text), add

    for name in sorted(body.WITHOUT_EFFECT):
        for fields in examples(name):
            without = {"stream": True} if "stream" in fields else {}
            assert await outcome(**fields) == await outcome(**without), fields


@ENDPOINTS
async def test_unknown_fields_are_named(
    gateway: Any, path: str, body: type[GenerationRequest], plain: dict[str, Any]
) -> None:
    unknown = {name for name in known_fields() - body.NEUTRAL.keys() if name.partition(".")[0] not in body.model_fields}
    assert unknown
    for name in sorted(unknown):
        response = await gateway.http.post(path, json={"model": "base", **plain, name: None})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "unknown_parameter", name)
