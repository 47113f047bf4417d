from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from llguidance import LLMatcher

from loramux.migrations.database import Database
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.engine.byte_vocabulary import byte_vocabulary, ids
from tests.platform.gateways import Gateway, open_gateway
from tests.platform.harmony_base import tokens_of
from tests.platform.messages_api.message_calls import (
    ASKED,
    CALL,
    HEADERS,
    WEATHER,
    answers,
    decoded,
    events_of,
    joined,
    kinds,
    message,
    post,
    prompt_of,
    same,
)
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

THOUGHT = "<think>\nHm.\n</think>\n"


@pytest.fixture
async def harmony(
    accounts: Database, harmony_tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, anyio_backend: str
) -> AsyncIterator[Gateway]:
    async with open_gateway(accounts, harmony_tokenizer, threads, max_model_len=1024) as gateway:
        yield gateway


async def test_text_is_answered_as_documented(gateway: Gateway) -> None:
    num_tokens = answers(gateway, "It is hot.", cached_tokens=2)
    seen = await message(gateway, system="Be brief.", metadata={"user_id": "user-7"})
    prompt_tokens = len(gateway.engine.adds[-1].prompt)
    [event] = gateway.usage()
    assert seen == {
        "id": event.request_id.replace("req_", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": "base",
        "content": [{"type": "text", "text": "It is hot."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt_tokens - 2,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": num_tokens + 1,
            "service_tier": "standard",
        },
    }
    assert (event.endpoint, event.end_user, event.status) == ("messages", "user-7", "completed")
    assert (event.prompt_tokens, event.cached_tokens, event.completion_tokens) == (prompt_tokens, 2, num_tokens + 1)
    assert "Be brief." in prompt_of(gateway)


async def test_text_is_streamed_in_the_documented_order(gateway: Gateway) -> None:
    answers(gateway, "It is hot.", cached_tokens=2)
    whole = await message(gateway)
    events = await events_of(gateway)
    start, opened, ping, *deltas, closed, last, stop = events
    assert start["message"]["content"] == []
    assert (start["message"]["stop_reason"], start["message"]["stop_sequence"]) == (None, None)
    assert opened == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert ping == {"type": "ping"}
    assert {one["type"] for one in deltas} == {"content_block_delta"}
    assert len(deltas) > 3
    assert closed == {"type": "content_block_stop", "index": 0}
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert last["usage"] == {name: value for name, value in whole["usage"].items() if name != "service_tier"}
    assert stop == {"type": "message_stop"}
    assert same(joined(events)) == same(whole)


async def test_thinking_text_and_parallel_calls_are_blocks(tools: Gateway) -> None:
    answers(tools, THOUGHT + "Let me look.\n" + CALL + "\n" + CALL.replace("Rome", "Oslo"))
    fields: dict[str, Any] = {"tools": [WEATHER], "thinking": {"type": "adaptive"}}
    whole = await message(tools, **fields)
    thinking, text, first, second = whole["content"]
    assert (thinking["type"], thinking["thinking"], bool(thinking["signature"])) == ("thinking", "Hm.", True)
    assert text == {"type": "text", "text": "Let me look."}
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "get_weather", {"city": "Rome"})
    assert second["input"] == {"city": "Oslo"}
    assert first["id"].startswith("toolu_")
    assert first["id"] != second["id"]
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    events = await events_of(tools, **fields)
    call = ["content_block_start", "input_json_delta", "content_block_stop"]
    assert kinds(events) == [
        "message_start",
        *["content_block_start", "ping", "thinking_delta", "signature_delta", "content_block_stop"],
        *["content_block_start", "text_delta", "content_block_stop"],
        *call,
        *call,
        *["message_delta", "message_stop"],
    ]
    assert same(joined(events)) == same(whole)
    counted = tools.services.metrics.registry.get_sample_value("loramux_tool_calls_total", {"format": "hermes"})
    assert counted == 4


@pytest.mark.parametrize("tokens_per_output", [1, 4, 16, 64])
async def test_channels_become_blocks(harmony: Gateway, tokens_per_output: int) -> None:
    tokenizer = harmony.services.prompts.tokenizer
    start, call = "<|start|>assistant<|channel|>", "commentary to=functions.get_weather <|constrain|>json<|message|>"
    thought = "analysis<|message|>Hot?"
    messages = ("", thought, "commentary<|message|>Let me look.", thought, thought, call + '{"city": "Rome"}')
    text = f"<|end|>{start}".join(messages).removeprefix("<|end|><|start|>assistant")
    script = Script(
        token_ids=tokens_of(tokenizer, text),
        stop_token_id=tokens_of(tokenizer, "<|call|>")[0],
        tokens_per_output=tokens_per_output,
    )
    harmony.engine.script = lambda add: script
    fields: dict[str, Any] = {"tools": [WEATHER], "thinking": {"type": "adaptive"}}
    whole = await message(harmony, **fields)
    *blocks, used = whole["content"]
    shown = [block.get("thinking", block.get("text")) for block in blocks]
    assert shown == ["Hot?", "Let me look.", "Hot?\nHot?"]
    assert (used["input"], whole["stop_reason"]) == ({"city": "Rome"}, "tool_use")
    assert same(joined(await events_of(harmony, **fields))) == same(whole)


async def test_results_and_thinking_return_to_the_prompt(tools: Gateway) -> None:
    answers(tools, THOUGHT + CALL + CALL.replace("Rome", "Oslo"))
    asked = await message(tools, tools=[WEATHER], thinking={"type": "adaptive"})
    first, second = (block["id"] for block in asked["content"] if block["type"] == "tool_use")
    results = [
        {"type": "tool_result", "tool_use_id": second, "content": "no such city", "is_error": True},
        {"type": "tool_result", "tool_use_id": first, "content": [{"type": "text", "text": "21 degrees"}]},
        {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
    ]
    messages = [*ASKED, {"role": "assistant", "content": asked["content"]}, {"role": "user", "content": results}]
    await message(tools, tools=[WEATHER], messages=messages)
    prompt = prompt_of(tools)
    for city in ("Rome", "Oslo"):
        assert f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>' in prompt
    assert "<|tool|>Error: no such city<|end|><|tool|>21 degrees<|end|><|user|>And now?<|end|>" in prompt


async def test_thinking_can_be_left_out_and_is_still_remembered(tools: Gateway) -> None:
    answers(tools, THOUGHT + "It is hot.")
    fields: dict[str, Any] = {"thinking": {"type": "enabled", "budget_tokens": 100, "display": "omitted"}}
    whole = await message(tools, **fields)
    thinking, text = whole["content"]
    assert (thinking["thinking"], text["text"]) == ("", "It is hot.")
    events = await events_of(tools, **fields)
    assert "thinking_delta" not in kinds(events)
    assert same(joined(events)) == same(whole)
    assert tools.engine.adds[-1].sampling.thinking is not None
    assert tools.engine.adds[-1].sampling.thinking.num_tokens == 100
    later = [*ASKED, {"role": "assistant", "content": whole["content"]}, *ASKED]
    assert (await post(tools, messages=later)).status_code == 200
    thinking["signature"] = thinking["signature"][:-4] + "AAA="
    assert (await post(tools, messages=later)).status_code == 400


async def test_a_model_does_not_think_unless_asked(tools: Gateway) -> None:
    answers(tools, THOUGHT + "It is hot.")
    for fields in ({}, {"thinking": {"type": "disabled"}}):
        seen = await message(tools, **fields)
        assert "<think>\n\n</think>" in prompt_of(tools)
        assert [block["type"] for block in seen["content"]] == ["text"]
    await message(tools, thinking={"type": "adaptive"})
    assert "<think>" not in prompt_of(tools)


async def test_effort_reaches_a_template_that_reads_it(harmony: Gateway) -> None:
    def effort() -> str:
        return prompt_of(harmony).partition("Reasoning: ")[2].partition("<|end|>")[0]

    await message(harmony, thinking={"type": "adaptive"})
    assert effort() == "medium", "the template's default"
    await message(harmony, thinking={"type": "adaptive"}, output_config={"effort": "max"})
    assert effort() == "high"
    await message(harmony, output_config={"effort": "max"})
    assert effort() == "low", "the least that the template knows"


async def test_a_model_without_thinking_answers_without(gateway: Gateway) -> None:
    answers(gateway, "It is hot.")
    for thinking in ({"type": "adaptive"}, {"type": "enabled", "budget_tokens": 100}):
        seen = await message(gateway, thinking=thinking, output_config={"effort": "max"})
        assert [block["type"] for block in seen["content"]] == ["text"]


async def test_stop_reasons(gateway: Gateway) -> None:
    num_tokens = answers(gateway, "It is hot. It is dry.")
    stopped = await message(gateway, stop_sequences=["dry", "hot"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "hot")
    assert stopped["content"] == [{"type": "text", "text": "It is "}]
    last = (await events_of(gateway, stop_sequences=["hot"]))[-2]
    assert last["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "hot"}
    assert (await message(gateway, max_tokens=num_tokens))["stop_reason"] == "max_tokens"
    empty = await message(gateway, stop_sequences=["I"])
    assert empty["content"] == []


async def test_an_answer_is_cut_at_the_end_of_the_context(gateway: Gateway) -> None:
    gateway.engine.script = lambda add: Script(token_ids=(5,) * add.max_tokens)
    seen = await message(gateway, max_tokens=32_000)
    assert seen["stop_reason"] == "model_context_window_exceeded"
    assert seen["usage"]["input_tokens"] + seen["usage"]["output_tokens"] == 256


async def test_an_answer_without_text_has_only_the_outer_events(gateway: Gateway) -> None:
    answers(gateway, "hot")
    events = await events_of(gateway, stop_sequences=["hot"])
    assert kinds(events) == ["message_start", "message_delta", "message_stop"]


async def test_the_last_message_of_the_assistant_is_continued(tools: Gateway) -> None:
    answers(tools, " hot.")
    seen = await message(tools, messages=[*ASKED, {"role": "assistant", "content": "It is"}])
    assert prompt_of(tools).endswith("<|assistant|>It is")
    assert seen["content"] == [{"type": "text", "text": " hot."}]


async def test_call_that_is_cut_off_returns_what_there_is_of_it(tools: Gateway) -> None:
    num_tokens = answers(tools, CALL.partition('me"}')[0])
    seen = await message(tools, tools=[WEATHER], max_tokens=num_tokens)
    [call] = seen["content"]
    assert (call["input"], seen["stop_reason"]) == ({"city": "Ro"}, "max_tokens")


@pytest.mark.parametrize(
    ("choice", "accepted", "refused"),
    [
        ({"type": "any"}, [CALL, CALL.replace("get_weather", "other")], ["It is hot."]),
        ({"type": "tool", "name": "get_weather"}, [CALL], ["It is hot.", CALL.replace("get_weather", "other")]),
        ({"type": "auto", "disable_parallel_tool_use": True}, [CALL, "It is hot."], [CALL + "\n" + CALL]),
        ({"type": "any", "disable_parallel_tool_use": True}, [CALL], [CALL + "\n" + CALL]),
    ],
    ids=["any", "tool", "one at most", "exactly one"],
)
async def test_tool_choice_constrains_the_answer(
    choice: dict[str, Any], accepted: list[str], refused: list[str], tools: Gateway
) -> None:
    other = {**WEATHER, "name": "other"}
    await message(tools, tools=[WEATHER, other], tool_choice=choice)
    grammar = tools.engine.adds[-1].grammar

    def accepts(answer: str) -> bool:
        matcher = LLMatcher(byte_vocabulary(), grammar, log_level=0)
        return matcher.consume_tokens(ids(answer)) and matcher.is_accepting()

    assert [accepts(answer) for answer in accepted] == [True] * len(accepted)
    assert [accepts(answer) for answer in refused] == [False] * len(refused)


async def test_tool_choice_none_hides_the_tools(tools: Gateway) -> None:
    await message(tools, tools=[WEATHER], tool_choice={"type": "none"})
    assert "get_weather" not in prompt_of(tools)


@pytest.mark.parametrize("field", ["output_config", "output_format"])
async def test_answer_follows_a_schema(field: str, tools: Gateway) -> None:
    form = {"type": "json_schema", "schema": {"enum": ["Rome", "Oslo"]}}
    await message(tools, **{field: {"format": form} if field == "output_config" else form})
    grammar = tools.engine.adds[-1].grammar
    matcher = LLMatcher(byte_vocabulary(), grammar, log_level=0)
    assert matcher.consume_tokens(ids('"Rome"'))
    assert not matcher.consume_tokens(ids('"Paris"'))


async def test_tokens_are_counted_without_a_charge(tools: Gateway) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER], "system": [{"type": "text", "text": "Be brief."}]}
    response = await post(tools, "/v1/messages/count_tokens", max_tokens=..., **fields)
    assert response.status_code == 200, response.text
    assert tools.engine.adds == []
    assert tools.usage() == []
    seen = await message(tools, **fields)
    assert response.json() == {"input_tokens": seen["usage"]["input_tokens"]}


async def test_the_line_for_anthropics_billing_is_no_part_of_the_prompt(gateway: Gateway) -> None:
    line = "x-anthropic-billing-header: cc_version=2.1; cch=8f1d2;"
    await message(gateway, system=[{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}])
    assert "billing" not in prompt_of(gateway)
    assert "Be brief." in prompt_of(gateway)


async def test_a_stream_that_fails_ends_with_an_error_event(gateway: Gateway) -> None:
    token_ids = gateway.services.prompts.tokenizer.encode("It is hot.")[1:]
    gateway.engine.script = lambda add: Script(token_ids=token_ids, error="engine_unavailable")
    response = await post(gateway, stream=True)
    *_, error = decoded(response.text)
    assert error == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "the engine stopped; try again"},
        "request_id": response.headers["request-id"],
    }


async def test_a_client_that_leaves_is_settled(gateway: Gateway, gateway_url: str) -> None:
    token_ids = gateway.services.prompts.tokenizer.encode("It is hot.")[1:]
    gateway.engine.script = lambda add: Script(token_ids=token_ids, stall_after=3)
    body = {"model": "base", "max_tokens": 200, "messages": ASKED, "stream": True}
    headers = {**HEADERS, "x-api-key": gateway.key}
    async with (
        httpx.AsyncClient() as http,
        http.stream("POST", f"{gateway_url}/v1/messages", json=body, headers=headers) as response,
    ):
        async for line in response.aiter_lines():
            if "text_delta" in line:
                break
    assert await gateway.services.run.requests.drain(60)
    [event] = gateway.usage()
    assert (event.status, event.completion_tokens) == ("aborted", 3)


async def test_requests_are_counted_under_their_own_name(gateway: Gateway) -> None:
    await asyncio.gather(message(gateway), post(gateway, "/v1/messages/count_tokens", max_tokens=...))
    sample = gateway.services.metrics.registry.get_sample_value
    for endpoint in ("messages", "count_tokens"):
        assert sample("loramux_requests_total", {"endpoint": endpoint, "status": "200"}) == 1
    assert sample("loramux_first_token_seconds_count", {"endpoint": "messages", "tier": "default"}) == 1
