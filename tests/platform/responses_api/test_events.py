from __future__ import annotations

from typing import Any

import pytest

from tests.platform.gateways import Gateway
from tests.platform.responses_api.transcripts import events_of, golden, transcript
from tests.platform.storing import answers

pytestmark = pytest.mark.anyio

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "name": "get_weather", "description": "Now.", "parameters": CITY}
SHELL: dict[str, Any] = {"type": "custom", "name": "shell", "description": "Runs a command."}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CUSTOM_CALL = '<tool_call>\n{"name": "shell", "arguments": {"input": "echo \\"a\\"\\n"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("name", "text", "body"),
    [
        ("text", "Hi there", {}),
        ("empty", "", {}),
        ("reasoning", "<think>\nWell</think>\n\nHi", {"include": ["reasoning.encrypted_content"]}),
        ("function_call", f"Look.\n{CALL}\n{CALL}", {"tools": [WEATHER]}),
        ("custom_call", CUSTOM_CALL, {"tools": [SHELL]}),
        ("incomplete_text", "Hi there", {"max_output_tokens": 2}),
        ("incomplete_reasoning", "<think>\nWell, let me see about that", {"max_output_tokens": 12}),
        ("cut_off_call", CALL[:-20], {"tools": [WEATHER]}),
    ],
)
async def test_stream_equals_the_transcript(tools: Gateway, name: str, text: str, body: dict[str, Any]) -> None:
    answers(tools, text)
    assert transcript(await events_of(tools, **body)) == golden(name)


async def test_failure_in_a_stream_is_an_error_and_a_failed_response(tools: Gateway) -> None:
    answers(tools, "Hi", error="internal_error")
    assert transcript(await events_of(tools)) == golden("failed")


async def test_log_probabilities_are_sent_with_the_text(tools: Gateway) -> None:
    answers(tools, "Hi")
    body = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    assert transcript(await events_of(tools, **body)) == golden("logprobs")


async def test_stream_ends_with_the_response_that_is_returned_whole(tools: Gateway) -> None:
    answers(tools, f"<think>\nWell</think>\n\nLook.\n{CALL}")
    body = {"model": "base", "input": "Hi", "tools": [WEATHER], "temperature": 0}
    whole = (await tools.http.post("/v1/responses", json=body)).json()
    last = (await events_of(tools, **body))[-1]
    [streamed] = transcript([last])
    [expected] = transcript([{**last, "response": whole}])
    assert streamed == expected
    fixed = {"id", "output", "created_at", "completed_at"}
    assert {key: value for key, value in whole.items() if key not in fixed} == {
        key: value for key, value in last["response"].items() if key not in fixed
    }
