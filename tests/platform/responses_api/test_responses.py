from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from loramux.platform.responses_api.openapi_schemas import ResponseDocument
from tests.platform.gateways import Gateway
from tests.platform.openai_api.test_tools import prompt_of
from tests.platform.responses_api.test_events import CALL, WEATHER
from tests.platform.responses_api.transcripts import RESPONSES
from tests.platform.storing import answers

pytestmark = pytest.mark.anyio


async def test_response_object_repeats_the_request(tools: Gateway) -> None:
    answers(tools, "Hi", cached_tokens=2)
    body = {
        "model": "base",
        "input": "Hello",
        "instructions": "Be brief",
        "max_output_tokens": 8,
        "max_tool_calls": 2,
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "service_tier": "flex",
        "store": True,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "none",
        "tools": [WEATHER, {"type": "custom", "name": "shell"}],
        "top_p": 0.9,
        "truncation": "disabled",
        "user": "u",
    }
    response = await tools.http.post(RESPONSES, json=body)
    assert response.status_code == 200, response.text
    document = response.json()
    TypeAdapter(ResponseDocument).validate_python(document)
    request_id = response.headers["x-request-id"]
    [event] = tools.usage()
    assert (event.endpoint, event.completion_tokens, event.end_user) == ("responses", 3, "u")
    assert document.pop("completed_at") >= document.pop("created_at")
    [item] = document.pop("output")
    assert item["content"][0]["text"] == "Hi"
    assert document == {
        "id": f"resp_{request_id.removeprefix('req_')}",
        "object": "response",
        "status": "completed",
        "background": False,
        "conversation": None,
        "error": None,
        "incomplete_details": None,
        "instructions": "Be brief",
        "max_output_tokens": 8,
        "max_tool_calls": 2,
        "metadata": {"a": "b"},
        "model": "base",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": "k",
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": "s",
        "service_tier": "flex",
        "store": False,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "none",
        "tools": [
            {**WEATHER, "strict": False},
            {"type": "custom", "name": "shell", "description": None, "format": {"type": "text"}},
        ],
        "top_logprobs": 0,
        "top_p": 0.9,
        "truncation": "disabled",
        "usage": {
            "input_tokens": event.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": event.prompt_tokens + 3,
        },
        "user": "u",
    }
    sample = tools.services.metrics.registry.get_sample_value
    assert sample("loramux_requests_total", {"endpoint": "responses", "status": "200"}) == 1


async def test_adapter_answers_by_its_own_name(tools: Gateway) -> None:
    tools.add_adapter("acme", "support")
    answers(tools, "Hi")
    response = await tools.http.post(RESPONSES, json={"model": "support", "input": "Hello"})
    assert response.headers["x-loramux-adapter"] == "acme/support@1"
    assert response.json()["model"] == "support"


async def test_conversation_is_the_prompt_of_the_same_chat(tools: Gateway) -> None:
    """A tool loop with OpenAI's client sends the output back as the next input."""
    answers(tools, f"Look.\n{CALL}")
    asked: list[Any] = [{"role": "user", "content": "How is Rome?"}]
    fields: dict[str, Any] = {"model": "base", "instructions": "Be brief", "tools": [WEATHER]}
    first = await tools.openai.responses.create(input=asked, **fields)
    [call] = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answers(tools, "Sunny.")
    second = await tools.openai.responses.create(
        input=[*asked, *(item.model_dump() for item in first.output), result], **fields
    )
    assert second.output_text == "Sunny."
    prompt = prompt_of(tools)
    function = {"name": call.name, "arguments": call.arguments}
    messages: list[Any] = [
        {"role": "system", "content": "Be brief"},
        *asked,
        {
            "role": "assistant",
            "content": "Look.",
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"},
    ]
    chat_tool = {"type": "function", "function": {key: WEATHER[key] for key in ("name", "description", "parameters")}}
    await tools.openai.chat.completions.create(model="base", messages=messages, tools=[chat_tool])
    assert prompt_of(tools) == prompt


class City(BaseModel):
    name: str


async def test_openais_helpers_parse_streams_and_schemas(tools: Gateway) -> None:
    answers(tools, '{"name": "Rome"}')
    parsed = await tools.openai.responses.parse(model="base", input="Hi", text_format=City)
    assert parsed.output_parsed == City(name="Rome")
    assert json.loads(tools.engine.adds[-1].grammar)["grammars"]
    async with tools.openai.responses.stream(model="base", input="Hi", text_format=City) as stream:
        kinds = [event.type async for event in stream]
        last = await stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert last.output_parsed == City(name="Rome")


@pytest.mark.parametrize(
    ("wanted", "is_constrained"),
    [
        ({"type": "text"}, False),
        ({"type": "json_object"}, True),
        ({"type": "json_schema", "name": "city", "schema": {"type": "object"}, "strict": True}, True),
    ],
)
async def test_text_format_constrains_the_answer(tools: Gateway, wanted: dict[str, Any], is_constrained: bool) -> None:
    answers(tools, "{}")
    response = await tools.http.post(RESPONSES, json={"model": "base", "input": "Hi", "text": {"format": wanted}})
    assert response.status_code == 200, response.text
    assert bool(tools.engine.adds[-1].grammar) == is_constrained


@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "get_weather"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]},
    ],
)
async def test_tool_choice_forces_a_call(tools: Gateway, choice: Any) -> None:
    answers(tools, CALL)
    body = {"model": "base", "input": "Hi", "tools": [WEATHER], "tool_choice": choice}
    response = await tools.http.post(RESPONSES, json=body)
    assert response.status_code == 200, response.text
    assert response.json()["tool_choice"] == choice
    assert "get_weather" in tools.engine.adds[-1].grammar


async def test_sampling_fields_reach_the_engine(gateway: Gateway) -> None:
    body = {"model": "base", "input": "Hi", "max_output_tokens": 3, "seed": 7, "top_k": 5, "stop": "zz", "top_p": 0.5}
    assert (await gateway.http.post(RESPONSES, json=body)).status_code == 200
    [add] = gateway.engine.adds
    assert (add.max_tokens, add.sampling.seed, add.sampling.top_k, add.sampling.top_p) == (3, 7, 5, 0.5)


async def test_reasoning_effort_and_template_variables_reach_the_template(tools: Gateway) -> None:
    answers(tools, "Hi")
    for fields in (
        {"reasoning": {"effort": "none", "summary": "auto"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        assert (await tools.http.post(RESPONSES, json={"model": "base", "input": "Hi", **fields})).status_code == 200
        assert prompt_of(tools).endswith("<think>\n\n</think>\n\n")


async def test_input_tokens_are_counted_without_a_charge(tools: Gateway) -> None:
    asked: dict[str, Any] = {"model": "base", "input": "Hi", "instructions": "Be brief", "tools": [WEATHER]}
    counted = await tools.openai.responses.input_tokens.count(**asked)
    assert tools.engine.adds == []
    assert tools.usage() == []
    answers(tools, "Hi")
    response = await tools.openai.responses.create(**asked)
    assert response.usage.input_tokens == counted.input_tokens
    missing = await tools.http.post(f"{RESPONSES}/input_tokens", json={**asked, "model": "nobody/x"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_exhausted_quota_names_the_responses_field(gateway: Gateway) -> None:
    gateway.limit("tokens_per_minute", 20)
    body = {"model": "base", "input": "Hi", "max_output_tokens": 100}
    response = await gateway.http.post(RESPONSES, json=body)
    assert response.status_code == 400
    assert "set max_output_tokens to at most 14" in response.json()["error"]["message"]
    assert "max_tokens" not in response.json()["error"]["message"].replace("max_output_tokens", "")
