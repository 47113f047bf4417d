from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from loramux.adapter_store.extensions import ExtensionKind, read_entries
from loramux.adapter_store.formats.version_files.answer_parsers import AnswerParsers
from loramux.migrations.database import Database
from loramux.platform.requests.services import GatewaySettings
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tool_calls.call_parser import CallParser
from loramux.platform.tool_calls.parsers import TOOL_PARSERS
from tests.engine.byte_vocabulary import byte_vocabulary, ids
from tests.platform.gateways import Gateway, open_gateway
from tests.platform.scripted_engine import Script
from tests.written_extension import write_distribution

pytestmark = pytest.mark.anyio

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather now.", "parameters": PARAMETERS},
}
ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
WithParsers = Callable[..., AbstractAsyncContextManager[Gateway]]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.fixture
def with_parsers(
    accounts: Database, tool_tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, anyio_backend: str
) -> WithParsers:
    def opened(
        tool_call_parser: str | None = None, reasoning_parser: str | None = None
    ) -> AbstractAsyncContextManager[Gateway]:
        chosen = AnswerParsers(tool_call_parser, reasoning_parser)
        return open_gateway(accounts, tool_tokenizer, threads, GatewaySettings(base_parsers=chosen))

    return opened


def answers(gateway: Gateway, text: str) -> None:
    token_ids = gateway.services.prompts.tokenizer.encode(text)[1:]
    gateway.engine.script = lambda add: Script(token_ids=token_ids)


def prompt_of(gateway: Gateway) -> str:
    tokenizer = gateway.services.prompts.tokenizer
    return b"".join(tokenizer.token_bytes(token) for token in gateway.engine.adds[-1].prompt).decode()


async def streamed(gateway: Gateway, **fields: Any) -> Any:
    async with gateway.openai.chat.completions.stream(model="base", messages=ASKED, **fields) as stream:
        return await stream.get_final_completion()


async def test_call_is_answered_with_its_arguments(tools: Gateway) -> None:
    answers(tools, "Let me look.\n" + CALL)
    whole = await tools.openai.chat.completions.create(model="base", messages=ASKED, tools=[WEATHER])
    for completion in (whole, await streamed(tools, tools=[WEATHER])):
        [choice] = completion.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me look."
        [call] = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "get_weather")
        assert json.loads(call.function.arguments) == {"city": "Rome"}
        assert call.id
    counted = tools.services.metrics.registry.get_sample_value("loramux_tool_calls_total", {"format": "hermes"})
    assert counted == 2


TAGGED = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=code>\n0123\n</parameter>\n<parameter=count>\n5\n"
    "</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=code>0123</parameter>\n<parameter=count>5</parameter>\n"
    "</function>\n</seed:tool_call>",
    "glm45": "<tool_call>f\n<arg_key>code</arg_key>\n<arg_value>0123</arg_value>\n<arg_key>count</arg_key>\n"
    "<arg_value>5</arg_value>\n</tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="code">0123</parameter>\n'
    '<parameter name="count">5</parameter>\n</invoke>\n</minimax:tool_call>',
}


@pytest.mark.parametrize("parser", TAGGED)
async def test_schema_decides_the_types_of_arguments_in_tags(with_parsers: WithParsers, parser: str) -> None:
    properties = {"code": {"type": "string"}, "count": {"type": "integer"}}
    function = {"name": "f", "parameters": {"type": "object", "properties": properties}}
    asked: dict[str, Any] = {"tools": [{"type": "function", "function": function}]}
    async with with_parsers(parser) as gateway:
        answers(gateway, TAGGED[parser])
        whole = await gateway.openai.chat.completions.create(model="base", messages=ASKED, **asked)
        chats = [completion.choices[0].message.tool_calls for completion in (whole, await streamed(gateway, **asked))]
        response = await gateway.openai.responses.create(
            model="base", input=ASKED, tools=[{"type": "function", "strict": False, **function}]
        )
        message = await gateway.http.post(
            "/v1/messages",
            headers={"x-api-key": gateway.key, "anthropic-version": "2023-06-01"},
            json={
                "model": "base",
                "max_tokens": 200,
                "messages": ASKED,
                "tools": [{"name": "f", "input_schema": function["parameters"]}],
            },
        )
    expected = {"code": "0123", "count": 5}
    assert [json.loads(call.function.arguments) for calls in chats for call in calls] == [expected] * 2
    [item] = response.output
    assert json.loads(item.arguments) == expected
    [block] = message.json()["content"]
    assert (block["name"], block["input"]) == ("f", expected)


async def test_message_with_only_calls_has_no_content(tools: Gateway) -> None:
    answers(tools, CALL + "\n" + CALL.replace("Rome", "Oslo"))
    completion = await tools.openai.chat.completions.create(model="base", messages=ASKED, tools=[WEATHER])
    message = completion.choices[0].message
    assert message.content is None
    assert [json.loads(call.function.arguments)["city"] for call in message.tool_calls] == ["Rome", "Oslo"]
    assert len({call.id for call in message.tool_calls}) == 2


async def test_arguments_are_streamed_piece_by_piece(tools: Gateway) -> None:
    answers(tools, CALL)
    stream = await tools.openai.chat.completions.create(model="base", messages=ASKED, tools=[WEATHER], stream=True)
    pieces = [piece for chunk in [c async for c in stream] for piece in chunk.choices[0].delta.tool_calls or []]
    assert (pieces[0].id is not None, pieces[0].function.name) == (True, "get_weather")
    assert all(piece.id is None and piece.function.name is None for piece in pieces[1:])
    assert len(pieces) > 3
    assert "".join(piece.function.arguments for piece in pieces) == '{"city": "Rome"}'


async def test_prompt_shows_tools_calls_and_results(tools: Gateway) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    messages: list[Any] = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "21 degrees"},
    ]
    await tools.openai.chat.completions.create(model="base", messages=messages, tools=[WEATHER], max_tokens=1)
    prompt = prompt_of(tools)
    assert '{"name": "get_weather", "description": "The weather now.", "parameters": {"type": "object"' in prompt
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt
    assert "21 degrees" in prompt


async def test_tool_choice_none_hides_the_tools(tools: Gateway) -> None:
    answers(tools, CALL)
    completion = await tools.openai.chat.completions.create(
        model="base", messages=ASKED, tools=[WEATHER], tool_choice="none"
    )
    assert "get_weather" not in prompt_of(tools)
    assert completion.choices[0].message.content == CALL
    assert completion.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_can_be_called(tools: Gateway, mode: str) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    await tools.openai.chat.completions.create(
        model="base", messages=ASKED, tools=[WEATHER, other], tool_choice=allowing(mode, "get_weather")
    )
    assert '"other"' in prompt_of(tools), "the prompt shows all tools, so that it stays the same"
    grammar = tools.engine.adds[-1].grammar

    def accepts(answer: str) -> bool:
        matcher = LLMatcher(byte_vocabulary(), grammar, log_level=0)
        return matcher.consume_tokens(ids(answer)) and matcher.is_accepting()

    assert accepts(CALL)
    assert not accepts(CALL.replace("get_weather", "other"))
    assert accepts("It is hot.") == (mode == "auto")


async def test_broken_call_is_text(tools: Gateway) -> None:
    answers(tools, "<tool_call>oops</tool_call>")
    for completion in (
        await tools.openai.chat.completions.create(model="base", messages=ASKED, tools=[WEATHER]),
        await streamed(tools, tools=[WEATHER]),
    ):
        assert completion.choices[0].message.content == "<tool_call>oops</tool_call>"
        assert not completion.choices[0].message.tool_calls
        assert completion.choices[0].finish_reason == "stop"


async def test_call_that_was_cut_off_ends_with_length(tools: Gateway) -> None:
    answers(tools, CALL)
    num_tokens = len(tools.services.prompts.tokenizer.encode(CALL)) - 12
    completion = await tools.openai.chat.completions.create(
        model="base", messages=ASKED, tools=[WEATHER], max_tokens=num_tokens
    )
    assert completion.choices[0].finish_reason == "length"
    [call] = completion.choices[0].message.tool_calls
    assert '{"city": "Rome"}'.startswith(call.function.arguments)


@pytest.mark.parametrize(
    ("stop", "reason", "arguments"),
    [
        ("Ro", "stop", '{"city": "'),
        ("}}", "stop", '{"city": "Rome"'),
        ("</tool_call>", "tool_calls", '{"city": "Rome"}'),
    ],
)
async def test_call_that_a_stop_string_cuts_off_ends_with_stop(
    tools: Gateway, stop: str, reason: str, arguments: str
) -> None:
    answers(tools, CALL)
    whole = await tools.openai.chat.completions.create(model="base", messages=ASKED, tools=[WEATHER], stop=stop)
    for completion in (whole, await streamed(tools, tools=[WEATHER], stop=stop)):
        [choice] = completion.choices
        assert choice.finish_reason == reason
        [call] = choice.message.tool_calls
        assert call.function.arguments == arguments


async def test_calls_are_content_without_a_parser(with_parsers: WithParsers) -> None:
    async with with_parsers("off") as gateway:
        answers(gateway, CALL)
        for completion in (
            await gateway.openai.chat.completions.create(model="base", messages=ASKED, tools=[WEATHER]),
            await streamed(gateway, tools=[WEATHER]),
        ):
            [choice] = completion.choices
            assert "get_weather" in prompt_of(gateway), "the tools are still shown"
            assert (choice.message.content, choice.finish_reason) == (CALL, "stop")
            assert not choice.message.tool_calls
        strict_weather = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
        for fields, param in (
            ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
            ({"tools": [WEATHER], "tool_choice": {**NAMED, "function": {"name": "get_weather"}}}, "tool_choice"),
            ({"tools": [WEATHER], "tool_choice": allowing("auto", "get_weather")}, "tool_choice"),
            ({"tools": [strict_weather]}, "tools"),
        ):
            response = await gateway.http.post(
                "/v1/chat/completions", json={"model": "base", "messages": ASKED, **fields}
            )
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", param)
            assert "tool calls are not parsed" in error["message"]


async def test_parser_can_be_chosen_by_name(with_parsers: WithParsers) -> None:
    async with with_parsers("pythonic") as gateway:
        answers(gateway, '[get_weather(city="Rome")]')
        for completion in (
            await gateway.openai.chat.completions.create(model="base", messages=ASKED, tools=[WEATHER]),
            await streamed(gateway, tools=[WEATHER]),
        ):
            [choice] = completion.choices
            assert (choice.message.content or "", choice.finish_reason) == ("", "tool_calls")
            [call] = choice.message.tool_calls
            assert (call.function.name, call.function.arguments) == ("get_weather", '{"city": "Rome"}')


@pytest.mark.parametrize(
    ("parser", "text", "reasoning"),
    [
        ("off", "<think>Hot?</think>Yes.", None),
        ("mistral", "[THINK]Hot?[/THINK]Yes.", "Hot?"),
        ("auto", "<think>Hot?</think>Yes.", "Hot?"),
    ],
)
async def test_reasoning_parser_can_be_chosen(
    with_parsers: WithParsers, parser: str, text: str, reasoning: str | None
) -> None:
    async with with_parsers(reasoning_parser=parser) as gateway:
        answers(gateway, text)
        completion = await gateway.openai.chat.completions.create(model="base", messages=ASKED)
        message = completion.choices[0].message
        assert getattr(message, "reasoning", None) == reasoning
        assert message.content == (text if reasoning is None else "Yes.")


async def test_reasoning_is_separate_and_counted(tools: Gateway) -> None:
    answers(tools, "<think>\nHot?\n</think>\n\nYes, hot.")
    whole = await tools.openai.chat.completions.create(model="base", messages=ASKED)
    for completion in (whole, await streamed(tools, stream_options={"include_usage": True})):
        message = completion.choices[0].message
        assert message.content == "Yes, hot."
        assert message.reasoning_content == message.reasoning == "Hot?"
        usage = completion.usage
        expected = len(tools.services.prompts.tokenizer.encode("<think>\nHot?\n</think>")) - 1
        assert usage.completion_tokens_details.reasoning_tokens == expected
        assert usage.completion_tokens > expected


async def test_thinking_can_be_turned_off(tools: Gateway) -> None:
    answers(tools, "Yes.")
    for fields in (
        {"reasoning_effort": "none"},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
    ):
        completion = await tools.openai.chat.completions.create(model="base", messages=ASKED, **fields)
        assert prompt_of(tools).endswith("<|assistant|><think>\n\n</think>\n\n")
        assert completion.choices[0].message.content == "Yes."
        assert completion.usage.completion_tokens_details is None


async def test_final_message_is_continued(tools: Gateway) -> None:
    messages: list[Any] = [*ASKED, {"role": "assistant", "content": "It is"}]
    await tools.openai.chat.completions.create(
        model="base",
        messages=messages,
        max_tokens=1,
        extra_body={"add_generation_prompt": False, "continue_final_message": True},
    )
    assert prompt_of(tools).endswith("<|assistant|>It is")


async def test_calls_can_be_sent_back_as_they_were_returned(tools: Gateway) -> None:
    odd = CALL.replace("get_weather", "weather.get() π").replace('"city"', '"city": "Oslo", "city"')
    answers(tools, "\n".join([CALL, odd]))
    first = await tools.openai.chat.completions.create(model="base", messages=ASKED, tools=[WEATHER])
    message = first.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "x"} for call in message.tool_calls]
    history: Any = [*ASKED, message.model_dump(), *results]
    await tools.openai.chat.completions.create(model="base", messages=history, tools=[WEATHER])
    assert prompt_of(tools).count(CALL) == 1
    assert '{"name": "weather.get() π", "arguments": {"city": "Rome"}}' in prompt_of(tools)


@pytest.mark.parametrize("max_tokens", range(30, 70, 4))
async def test_call_that_was_cut_off_can_be_sent_back(tools: Gateway, max_tokens: int) -> None:
    written = CALL.replace('"Rome"', '"Rome π \\u00e9 \\"", "days": [1, {"a": -2.5e3}], "is_long": true')
    answers(tools, written)
    first = await tools.openai.chat.completions.create(
        model="base", messages=ASKED, tools=[WEATHER], max_tokens=max_tokens
    )
    assert first.choices[0].finish_reason == "length"
    message = first.choices[0].message
    [call] = message.tool_calls
    assert call.function.arguments in written
    history: Any = [*ASKED, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "cut off"}]
    await tools.openai.chat.completions.create(model="base", messages=history, tools=[WEATHER])
    # The text is all there, as a string.
    arguments = json.dumps({"arguments": call.function.arguments}, ensure_ascii=False)
    assert f'{{"name": "get_weather", "arguments": {arguments}}}' in prompt_of(tools)


@pytest.mark.parametrize("arguments", ["{'city': 'Rome'}", '{"city": NaN}', '{"city": "Rome",}', "[1]", "Rome"])
async def test_malformed_call_can_be_sent_back(tools: Gateway, arguments: str) -> None:
    # In a call, the arguments can also be a string that contains them.
    answers(tools, CALL.replace('{"city": "Rome"}', json.dumps(arguments)))
    first = await tools.openai.chat.completions.create(model="base", messages=ASKED, tools=[WEATHER])
    message = first.choices[0].message
    [call] = message.tool_calls
    assert call.function.arguments == arguments
    history: Any = [*ASKED, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "malformed"}]
    await tools.openai.chat.completions.create(model="base", messages=history, tools=[WEATHER])
    assert json.dumps({"arguments": arguments}) in prompt_of(tools)


async def test_no_limit_on_the_thinking_can_be_asked_for(tools: Gateway) -> None:
    body = {"model": "base", "messages": ASKED, "max_tokens": 1, "thinking_token_budget": -1}
    assert (await tools.http.post("/v1/chat/completions", json=body)).status_code == 200
    assert tools.engine.adds[-1].sampling.thinking is None


async def test_open_thinking_is_continued(tools: Gateway) -> None:
    answers(tools, " weather.</think>\n\nIt is hot.")
    body = {
        "model": "base",
        "messages": [*ASKED, {"role": "assistant", "content": "<think>I need the"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
        "thinking_token_budget": 40,
    }
    completion = (await tools.http.post("/v1/chat/completions", json=body)).json()
    message = completion["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (" weather.", "It is hot.")
    assert completion["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    budget = tools.engine.adds[-1].sampling.thinking
    assert budget is not None
    assert budget.is_open


CALLED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def offering(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


def strict(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "strict": True, "parameters": parameters}}


def allowing(mode: str, *names: Any) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def saying(**message: Any) -> dict[str, Any]:
    return {"messages": [{"content": "x", **message}]}


NAMED = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        # Their representations would take long.
        pytest.param({"tools": [WEATHER] * 10_000}, "invalid_value", "tools", id="many tools"),
        ({"tools": [WEATHER, WEATHER]}, "invalid_value", "tools"),
        (offering(name="a\nb"), "invalid_value", "tools[0].function.name"),
        (offering(parameters=1), "invalid_type", "tools[0].function.parameters"),
        (offering(parameters={"type": "integer"}), "invalid_value", "tools[0].function.parameters"),
        (offering(parameters={"type": ["array", "null"]}), "invalid_value", "tools[0].function.parameters"),
        (
            {"tools": [WEATHER, strict({"properties": {"x": {"type": "array", "contains": {}}}})]},
            "grammar_refused",
            "tools[1].function.parameters",
        ),
        (
            {"tools": [WEATHER, strict({"properties": {"x": {"$ref": "#"}}, "required": ["x"]})]},
            "grammar_refused",
            "tools[1].function.parameters",
        ),
        (
            {"tools": [WEATHER, strict({"enum": [1, "a"]})], "response_format": {"type": "json_object"}},
            "grammar_refused",
            "tools[1].function.parameters",
        ),
        ({"tools": [{"type": "retrieval"}]}, "invalid_value", "tools[0].type"),
        ({"tool_choice": "required"}, "invalid_value", "tool_choice"),
        ({"tool_choice": "always", "tools": [WEATHER]}, "invalid_value", "tool_choice"),
        ({"tool_choice": NAMED, "tools": [WEATHER]}, "invalid_value", "tool_choice"),
        ({"tool_choice": allowing("auto", "f"), "tools": [WEATHER]}, "invalid_value", "tool_choice"),
        ({"tool_choice": allowing("auto"), "tools": [WEATHER]}, "invalid_value", "tool_choice"),
        ({"tool_choice": allowing("none", "get_weather"), "tools": [WEATHER]}, "invalid_value", "tool_choice"),
        pytest.param(
            {"tool_choice": allowing("auto", *["get_weather"] * 10_000)}, "invalid_value", "tool_choice", id="repeated"
        ),
        ({"tool_choice": allowing("auto", 5), "tools": [WEATHER]}, "invalid_value", "tool_choice"),
        (saying(role="tool"), "missing_required_parameter", "messages[0].tool_call_id"),
        (saying(role="tool", tool_call_id="c1"), "invalid_value", "messages[0].tool_call_id"),
        (saying(role="user", tool_calls=[CALLED]), "invalid_value", "messages[0].tool_calls"),
        (saying(role="user", reasoning="y"), "invalid_value", "messages[0].reasoning"),
        ({"chat_template_kwargs": {"messages": []}}, "invalid_value", "chat_template_kwargs"),
        ({"continue_final_message": True}, "invalid_value", "continue_final_message"),
        ({"thinking_token_budget": -2}, "invalid_value", "thinking_token_budget"),
        ({"thinking_token_budget": 2**31}, "invalid_value", "thinking_token_budget"),
        ({"thinking_token_budget": "5"}, "invalid_type", "thinking_token_budget"),
        ({"reasoning_effort": "most"}, "invalid_value", "reasoning_effort"),
    ],
    ids=lambda value: repr(value)[:60],
)
async def test_bad_tools_are_refused(tools: Gateway, change: dict[str, Any], code: str, param: str) -> None:
    response = await tools.http.post("/v1/chat/completions", json={"model": "base", "messages": ASKED, **change})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param), error


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "json_object"}}], ids=["free", "constrained"])
async def test_budget_of_the_thinking_reaches_the_engine(tools: Gateway, fields: dict[str, Any]) -> None:
    body = {"model": "base", "messages": ASKED, "max_tokens": 1, "thinking_token_budget": 7, **fields}
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for change in ({}, {"n": 2}, off):
        assert (await tools.http.post("/v1/chat/completions", json={**body, **change})).status_code == 200
    first, *others, without = [add.sampling.thinking for add in tools.engine.adds]
    assert first is not None
    decoded = [tools.services.prompts.tokenizer.decode(ids) for ids in (first.begin, first.end)]
    assert (first.num_tokens, first.is_open, decoded) == (7, False, ["<think>", "</think>"])
    assert others == [first, first]
    # The prompt has already ended the thinking.
    assert without is None


INVOKE_PARSER = """
from loramux.platform.tool_calls.call_syntax import Block, CallSyntax
from loramux.platform.tool_calls.json_calls import JsonCallParser

class InvokeParser(JsonCallParser):
    markers = ("<invoke>",)
    ends = ("</invoke>",)
    syntax = CallSyntax({"<invoke>": Block(end="</invoke>")}, separator="; ", is_grouped=False)

    def _block(self, marker):
        yield from self._call_object(is_marked=True)
        yield from self._reader.literal(self.ends[0])
"""


@pytest.fixture
def invoke_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs an extension with the tool parser `invoke`."""
    entries = {"loramux.tool_parsers": {"invoke": "invoke_parser_module:InvokeParser"}}
    site = write_distribution(tmp_path, "invoke-dist", entries, invoke_parser_module=INVOKE_PARSER)
    monkeypatch.syspath_prepend(site)
    kind = ExtensionKind[CallParser](
        "tool_parsers", "tool parser", CallParser, problem=TOOL_PARSERS._problem, read=read_entries
    )
    monkeypatch.setattr("loramux.platform.tool_calls.parsers.TOOL_PARSERS", kind)


@pytest.mark.usefixtures("invoke_parser")
async def test_parser_of_an_extension_reads_and_forces_calls(with_parsers: WithParsers) -> None:
    call = '<invoke>{"name": "get_weather", "arguments": {"city": "Rome"}}</invoke>'
    async with with_parsers("invoke") as gateway:
        answers(gateway, f"Let me look. {call}")
        completion = await gateway.openai.chat.completions.create(model="base", messages=ASKED, tools=[WEATHER])
        [choice] = completion.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
        assert choice.message.tool_calls[0].function.arguments == '{"city": "Rome"}'
        answers(gateway, call)
        await gateway.openai.chat.completions.create(
            model="base", messages=ASKED, tools=[WEATHER], tool_choice="required"
        )
        matcher = LLMatcher(byte_vocabulary(), gateway.engine.adds[-1].grammar, log_level=0)
        assert matcher.consume_tokens(ids(call))
        assert matcher.is_accepting()
