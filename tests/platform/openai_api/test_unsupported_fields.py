from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loramux.engine.protocol.messages import Add
from loramux.platform.bodies.chat_request import ChatRequest
from loramux.platform.bodies.generation_request import GenerationRequest
from loramux.platform.bodies.request_body import validated
from loramux.platform.errors import InvalidRequest
from loramux.platform.openai_api.completion_request import CompletionRequest

pytestmark = pytest.mark.anyio

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
PLAIN: dict[str, dict[str, Any]] = {
    TEXT: {"model": "base", "prompt": "Hello"},
    CHAT: {"model": "base", "messages": [{"role": "user", "content": "Hello"}]},
}
ENDPOINTS = pytest.mark.parametrize(("path", "body"), [(TEXT, CompletionRequest), (CHAT, ChatRequest)])
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "now"}}

VENDOR_DEFAULTS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("vendor_defaults.json").read_text())
"""The documented defaults of OpenAI, vLLM 0.33 and SGLang 0.5.10 for all fields except the prompt and the model."""


@pytest.mark.parametrize("of", VENDOR_DEFAULTS)
async def test_all_defaults_of_a_vendor_change_nothing(gateway: Any, of: str) -> None:
    path = CHAT if of.endswith("chat") else TEXT
    assert await work(gateway, path, **VENDOR_DEFAULTS[of]) == await work(gateway, path)


@ENDPOINTS
async def test_every_neutral_value_changes_nothing(gateway: Any, path: str, body: type[GenerationRequest]) -> None:
    for number in range(1 + max(map(len, body.NEUTRAL.values()))):
        fields = {name: (None, *neutral)[number] for name, neutral in body.NEUTRAL.items() if number <= len(neutral)}
        assert await work(gateway, path, **fields) == await work(gateway, path)


async def work(gateway: Any, path: str, **fields: Any) -> Add:
    response = await gateway.http.post(path, json={**PLAIN[path], **fields})
    assert response.status_code == 200, response.text
    add: Add = gateway.engine.adds[-1]
    return msgspec.structs.replace(add, sequence_id="")


@ENDPOINTS
def test_other_values_are_refused_by_name(path: str, body: type[GenerationRequest]) -> None:
    for name in body.NEUTRAL.keys() - body.model_fields.keys():
        neutral = body.NEUTRAL[name]
        # A boolean is not a number, although they are equal in Python.
        swapped = [int(one) if isinstance(one, bool) else bool(one) for one in neutral if isinstance(one, (bool, int))]
        for value in ("something", ["x"], {"x": 1}, 0.5, *swapped):
            with pytest.raises(InvalidRequest) as caught:
                validated({**PLAIN[path], name: value}, body)
            assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name), value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"choice": ["a"], "whitespace_pattern": None, "disable_any_whitespace": False}}, None),
        ({"structured_outputs": {"choice": ["a"], "disable_additional_properties": False}}, None),
        ({"response_format": {"type": "text", "json_schema": None}}, None),
        ({"response_format": {"type": "json_object", "json_schema": None}}, None),
        ({"tools": [{**TOOL, "defer_loading": None}]}, None),
        ({"tools": [{**TOOL, "function": {"name": "now", "defer_loading": False}}]}, None),
        ({"structured_outputs": {"choice": ["a"], "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_neutral_values_inside_a_field(fields: dict[str, Any], param: str | None) -> None:
    document = {**PLAIN[CHAT], **fields}
    if param is None:
        validated(document, ChatRequest)
        return
    with pytest.raises(InvalidRequest) as caught:
        validated(document, ChatRequest)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", param)


def test_unknown_fields_beside_a_field_with_another_name_in_json_are_refused() -> None:
    wanted = {"json": {"type": "object"}, **{f"unknown_{number}": 1 for number in range(20)}}
    with pytest.raises(InvalidRequest) as caught:
        validated({**PLAIN[CHAT], "structured_outputs": wanted}, ChatRequest)
    assert (caught.value.code, caught.value.param) == ("unknown_parameter", "structured_outputs.unknown_0")


async def test_hints_in_tools_do_not_reach_the_template(tools: Any) -> None:
    hinted = {**TOOL, "function": {**TOOL["function"], "cache_control": {"type": "ephemeral"}}, "cache_control": {}}
    plain, with_hints = [await work(tools, CHAT, tools=[tool]) for tool in (TOOL, hinted)]
    assert plain == with_hints
