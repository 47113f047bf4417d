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


@pytest.mark.parametrize("tokens_per_output", [1, 3, 64])
@pytest.mark.parametrize(
    "text",
    [
        pytest.param("A 🦊 and 漢字", id="characters-of-several-tokens"),
        pytest.param("<think>\nWell 🦊</think>\n\nHi there", id="reasoning"),
        pytest.param("Look.\n\n \nNo call. <tool", id="text-like-the-start-of-a-call"),
    ],
)
async def test_each_token_of_the_text_has_its_log_probability(
    tools: Gateway, text: str, tokens_per_output: int
) -> None:
    answers(tools, text, tokens_per_output=tokens_per_output)
    events = await events_of(tools, include=["message.output_text.logprobs"], tools=[WEATHER])
    message = events[-1]["response"]["output"][-1]
    [part] = message["content"]
    spelled = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
    assert spelled.decode().lstrip("\n") == part["text"] == text.rpartition("</think>\n\n")[2]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"]


@pytest.mark.parametrize("tokens_per_output", [1, 3, 64])
@pytest.mark.parametrize("reasoning", ["", "<think>\nWell</think>"])
async def test_tokens_of_a_call_are_not_those_of_a_text(tools: Gateway, reasoning: str, tokens_per_output: int) -> None:
    answers(tools, f"{reasoning}Look.\n{CALL}\n{CALL}\nDone 🦊.\n{CALL}", tokens_per_output=tokens_per_output)
    events = await events_of(tools, include=["message.output_text.logprobs"], tools=[WEATHER])
    items = [item for item in events[-1]["response"]["output"] if item["type"] != "reasoning"]
    assert [item["type"] for item in items] == [
        *("message", "function_call", "function_call", "message", "function_call"),
    ]
    parts = [part for item in items if item["type"] == "message" for part in item["content"]]
    assert [part["text"] for part in parts] == ["Look.", "Done 🦊."]
    for part in parts:
        assert b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode() == part["text"]


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
