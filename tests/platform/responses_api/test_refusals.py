from __future__ import annotations

from typing import Any

import pytest

from tests.platform.gateways import Gateway
from tests.platform.openai_api.test_bad_input import refused
from tests.platform.responses_api.test_events import SHELL, WEATHER
from tests.platform.responses_api.transcripts import RESPONSES

pytestmark = pytest.mark.anyio

BAD_SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "nothing"}}


def lark(definition: str) -> dict[str, Any]:
    return {**SHELL, "format": {"type": "grammar", "syntax": "lark", "definition": definition}}


@pytest.mark.parametrize(
    ("change", "status", "code", "param"),
    [
        ({"model": None}, 400, "invalid_type", "model"),
        ({"model": "nobody/x"}, 404, "model_not_found", "model"),
        ({"input": None}, 400, "invalid_type", "input"),
        ({"input": "x" * 200_000}, 400, "context_length_exceeded", "input"),
        ({"max_output_tokens": 0}, 400, "invalid_value", "max_output_tokens"),
        ({"max_output_tokens": 4000}, 400, "context_length_exceeded", "max_output_tokens"),
        ({"previous_response_id": "resp_1"}, 404, "previous_response_not_found", "previous_response_id"),
        ({"conversation": "conv_1"}, 404, "conversation_not_found", "conversation"),
        ({"conversation": {"id": "conv_1"}}, 404, "conversation_not_found", "conversation"),
        ({"conversation": {"id": "conv_1", "x": 1}}, 400, "invalid_value", "conversation"),
        ({"conversation": 5}, 400, "invalid_value", "conversation"),
        (
            {"conversation": "conv_1", "previous_response_id": "resp_1"},
            400,
            "invalid_value",
            "previous_response_id",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
            400,
            "invalid_value",
            "structured_outputs.regex",
        ),
        ({"background": True}, 400, "storage_not_allowed", "background"),
        ({"prompt": {"id": "pmpt_1"}}, 400, "unsupported_parameter", "prompt"),
        ({"tools": [{"type": "web_search"}]}, 400, "unsupported_tool", "tools[0].type"),
        ({"tools": [WEATHER, {"type": "code_interpreter"}]}, 400, "unsupported_tool", "tools[1].type"),
        ({"tools": [{"type": "computer_use_preview"}]}, 400, "unsupported_tool", "tools[0].type"),
        ({"tools": [{"type": "file_search"}]}, 400, "unsupported_tool", "tools[0].type"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, 400, "unsupported_tool", "tools[0].type"),
        ({"tools": [{"type": "image_generation"}]}, 400, "unsupported_tool", "tools[0].type"),
        ({"tools": [{"name": "x"}]}, 400, "invalid_value", "tools[0]"),
        ({"tools": [WEATHER, WEATHER]}, 400, "invalid_value", "tools"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, 400, "invalid_value", "tools[0].name"),
        ({"tools": [{**WEATHER, "more": 1}]}, 400, "unknown_parameter", "tools[0].more"),
        (
            {"tools": [{**WEATHER, "strict": True, "parameters": {"type": "object", "oneOf": 5}}]},
            400,
            "grammar_refused",
            "tools[0].parameters",
        ),
        ({"tools": [lark("start: start")]}, 400, "grammar_refused", "tools[0].format.definition"),
        ({"tools": [lark("start: /(/")]}, 400, "grammar_refused", "tools[0].format"),
        ({"tool_choice": "all"}, 400, "invalid_value", "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, 400, "invalid_value", "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "other"}}, 400, "invalid_value", "tool_choice"),
        ({"tool_choice": "required"}, 400, "invalid_value", "tool_choice"),
        ({"text": {"format": BAD_SCHEMA}}, 400, "grammar_refused", "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x"}}},
            400,
            "missing_required_parameter",
            "text.format.schema",
        ),
        ({"text": {"verbosity": "high"}}, 400, "unsupported_parameter", "text.verbosity"),
        ({"reasoning": {"effort": "huge"}}, 400, "invalid_value", "reasoning.effort"),
        ({"top_logprobs": 2}, 400, "invalid_value", "top_logprobs"),
        ({"include": ["everything"]}, 400, "invalid_value", "include[0]"),
        ({"stream_options": {"include_obfuscation": False}}, 400, "invalid_value", "stream_options"),
        ({"truncation": "middle"}, 400, "invalid_value", "truncation"),
        ({"n": 2}, 400, "unknown_parameter", "n"),
        ({"logit_bias": {"9999": 1.0}}, 400, "invalid_value", "logit_bias"),
        ({"metadata": {str(key): "x" for key in range(100)}}, 400, "invalid_value", "metadata"),
    ],
)
async def test_bad_request_names_its_field(
    tools: Gateway, change: dict[str, Any], status: int, code: str, param: str
) -> None:
    error = await refused(tools, RESPONSES, status, code, param, json={"model": "base", "input": "Hi", **change})
    assert not any(name in error["message"] for name in ("messages", "max_completion", "response_format", ".function"))


async def test_reasoning_effort_without_a_template_that_reads_it(gateway: Gateway) -> None:
    body = {"model": "base", "input": "Hi", "reasoning": {"effort": "high"}}
    await refused(gateway, RESPONSES, 400, "unsupported_parameter", "reasoning.effort", json=body)


async def test_websocket_mode_is_refused_by_name(gateway: Gateway) -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket"}
    response = await gateway.http.get(RESPONSES, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "unsupported_transport")
    other = await gateway.http.get(RESPONSES)
    assert (other.status_code, other.headers["allow"]) == (405, "POST")


async def test_key_is_needed(gateway: Gateway) -> None:
    response = await gateway.http.post(RESPONSES, json={"model": "base", "input": "Hi"}, headers={"authorization": ""})
    assert response.status_code == 401
