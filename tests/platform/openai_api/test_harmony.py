from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from llguidance import LLMatcher

from loramux.adapter_store.formats.version_files.answer_parsers import AnswerParsers
from loramux.engine.constraints.vocabulary import load_vocabulary
from loramux.migrations.database import Database
from loramux.platform.requests.services import GatewaySettings
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.demo_base import DEMO_BASE
from tests.platform.gateways import Gateway, open_gateway
from tests.platform.harmony_base import tokens_of
from tests.platform.scripted_engine import Script

pytestmark = pytest.mark.anyio

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
THOUGHT = "<|channel|>analysis<|message|>Hot?<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
ROME = '{"city": "Rome"}'
CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ROME}"
WithParsers = Callable[..., AbstractAsyncContextManager[Gateway]]


@pytest.fixture
def with_parsers(
    accounts: Database, harmony_tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, anyio_backend: str
) -> WithParsers:
    def opened(calls: str | None = None, reasoning: str | None = None) -> AbstractAsyncContextManager[Gateway]:
        settings = GatewaySettings(base_parsers=AnswerParsers(calls, reasoning))
        return open_gateway(accounts, harmony_tokenizer, threads, settings, max_model_len=1024)

    return opened


@pytest.fixture
async def gateway(with_parsers: WithParsers) -> AsyncIterator[Gateway]:
    async with with_parsers() as gateway:
        yield gateway


def answers(gateway: Gateway, text: str, end: str = "<|return|>", **fields: Any) -> None:
    tokenizer = gateway.services.prompts.tokenizer
    token_ids, [end_id] = tokens_of(tokenizer, text), tokens_of(tokenizer, end)
    gateway.engine.script = lambda add: Script(token_ids=token_ids, stop_token_id=end_id, **fields)


def prompt_of(gateway: Gateway) -> str:
    return gateway.services.prompts.tokenizer.decode(gateway.engine.adds[-1].prompt, skip_special_tokens=False)


async def asked(gateway: Gateway, **fields: Any) -> list[Any]:
    """The completion, whole and streamed."""
    body: Any = {"model": "base", "messages": ASKED, **fields}
    whole = await gateway.openai.chat.completions.create(**body)
    async with gateway.openai.chat.completions.stream(**body, stream_options={"include_usage": True}) as stream:
        return [whole, await stream.get_final_completion()]


async def test_reasoning_and_text_are_separate(gateway: Gateway) -> None:
    answers(gateway, f"{THOUGHT}{FINAL}It is ½ hot.")
    hidden = {"skip_special_tokens": False, "include_stop_str_in_output": True}
    for extra in ({}, hidden):
        for completion in await asked(gateway, extra_body=extra):
            [choice] = completion.choices
            message = choice.message
            assert (message.content, message.reasoning_content) == ("It is ½ hot.", "Hot?")
            assert (choice.finish_reason, message.tool_calls) == ("stop", None)
            num_reasoning = len(
                tokens_of(gateway.services.prompts.tokenizer, THOUGHT.removesuffix("<|start|>assistant"))
            )
            assert completion.usage.completion_tokens_details.reasoning_tokens == num_reasoning
    sampling = gateway.engine.adds[-1].sampling
    assert set(sampling.stop_token_ids) == set(tokens_of(gateway.services.prompts.tokenizer, "<|return|><|call|>"))


async def test_call_is_answered_with_its_arguments(gateway: Gateway) -> None:
    preamble = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
    answers(gateway, f"{THOUGHT}{preamble}{CALL}", end="<|call|>")
    for completion in await asked(gateway, tools=[WEATHER]):
        [choice] = completion.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
        assert choice.message.reasoning_content == "Hot?"
        [call] = choice.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_weather", ROME)
    counted = gateway.services.metrics.registry.get_sample_value("loramux_tool_calls_total", {"format": "harmony"})
    assert counted == 2


async def test_call_that_a_stop_string_cuts_off_ends_with_stop(gateway: Gateway) -> None:
    answers(gateway, CALL, end="<|call|>")
    for completion in await asked(gateway, tools=[WEATHER], stop="Ro"):
        [choice] = completion.choices
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls[0].function.arguments == '{"city": "'


async def test_each_token_has_its_log_probability(gateway: Gateway) -> None:
    answers(gateway, f"{THOUGHT}{FINAL}Yes.")
    for completion in await asked(gateway, logprobs=True):
        tokens = [entry.token for entry in completion.choices[0].logprobs.content]
        assert "".join(tokens) == f"{THOUGHT}{FINAL}Yes.<|return|>"
        assert completion.choices[0].message.content == "Yes."


@pytest.mark.parametrize("tokens_per_output", [1, 64])
async def test_log_probabilities_of_a_response_are_those_of_its_text(gateway: Gateway, tokens_per_output: int) -> None:
    answers(gateway, f"{THOUGHT}{FINAL}Yes.", tokens_per_output=tokens_per_output)
    body = {"model": "base", "input": "Hi", "include": ["message.output_text.logprobs"]}
    response = (await gateway.http.post("/v1/responses", json=body)).json()
    [part] = response["output"][-1]["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"] == "Yes."


@pytest.mark.parametrize("tokens_per_output", [1, 4, 16, 64])
async def test_items_keep_the_order_of_the_messages(gateway: Gateway, tokens_per_output: int) -> None:
    preamble = "<|channel|>commentary<|message|>I will look it up for you now.<|end|><|start|>assistant"
    answers(gateway, f"{THOUGHT}{preamble}{THOUGHT}{THOUGHT}{CALL}", "<|call|>", tokens_per_output=tokens_per_output)
    body: dict[str, Any] = {"model": "base", "input": "Hi", "tools": [{"type": "function", **WEATHER["function"]}]}
    for include in ([], ["message.output_text.logprobs"]):
        response = (await gateway.http.post("/v1/responses", json={**body, "include": include})).json()
        *texts, call = response["output"]
        shown = [item["content"][0]["text"] for item in texts]
        assert [*shown, call["arguments"]] == ["Hot?", "I will look it up for you now.", "Hot?\nHot?", ROME]
        if include:
            logprobs = response["output"][1]["content"][0]["logprobs"]
            assert "".join(entry["token"] for entry in logprobs) == shown[1]


async def test_history_is_rendered_by_the_template(gateway: Gateway) -> None:
    answers(gateway, f"{THOUGHT}{CALL}", end="<|call|>")
    first = await gateway.openai.chat.completions.create(model="base", messages=ASKED, tools=[WEATHER])
    message = first.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21 degrees"}
    history: Any = [*ASKED, message.model_dump(exclude_none=True), result]
    await asked(gateway, messages=history, tools=[WEATHER], reasoning_effort="high")
    prompt = prompt_of(gateway)
    assert prompt.startswith("<|start|>system<|message|>Reasoning: high<|end|>")
    thought = "<|start|>assistant<|channel|>analysis<|message|>Hot?<|end|>"
    called = f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{ROME}<|call|>"
    told = "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>21 degrees<|end|>"
    assert prompt.endswith(f"{thought}{called}{told}<|start|>assistant")
    history[1]["content"] = "I look."
    await asked(gateway, messages=history, tools=[WEATHER])
    assert "I look." in prompt_of(gateway)


async def test_final_message_is_continued(gateway: Gateway) -> None:
    answers(gateway, " hot.")
    messages = [*ASKED, {"role": "assistant", "content": "It is"}]
    extra = {"add_generation_prompt": False, "continue_final_message": True}
    for completion in await asked(gateway, messages=messages, extra_body=extra):
        assert completion.choices[0].message.content == " hot."
    assert prompt_of(gateway).endswith(f"<|start|>assistant{FINAL}It is")


FORCED = {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
STRUCTURED = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": {"hot": True}}}}
}


@pytest.mark.parametrize(
    ("fields", "allowed", "forbidden"),
    [
        (FORCED, THOUGHT + CALL, f"{FINAL}It"),
        (STRUCTURED, THOUGHT + FINAL + '{"hot":true}', '{"hot":true}'),
        ({"tools": [WEATHER], "parallel_tool_calls": False}, THOUGHT + FINAL + "It is.", CALL.replace("get", "set")),
    ],
    ids=["forced", "structured", "single"],
)
async def test_grammar_constrains_calls_and_the_final_message(
    gateway: Gateway, fields: dict[str, Any], allowed: str, forbidden: str
) -> None:
    answers(gateway, allowed)
    await asked(gateway, max_tokens=100, **fields)
    # Unlike the demo's tokenizer, this one has two special tokens among those that adapters can add.
    vocabulary, grammar = load_vocabulary(DEMO_BASE, 1024, (1,)), gateway.engine.adds[-1].grammar
    tokenizer = gateway.services.prompts.tokenizer
    matcher = LLMatcher(vocabulary, grammar, log_level=0)
    assert matcher.consume_tokens(list(tokens_of(tokenizer, allowed)))
    assert matcher.is_accepting()
    assert not LLMatcher(vocabulary, grammar, log_level=0).consume_tokens(list(tokens_of(tokenizer, forbidden)))


async def test_thinking_is_limited_between_its_markers(gateway: Gateway) -> None:
    answers(gateway, f"{THOUGHT}{FINAL}Yes.")
    await asked(gateway, extra_body={"thinking_token_budget": 7})
    budget, tokenizer = gateway.engine.adds[-1].sampling.thinking, gateway.services.prompts.tokenizer
    assert budget is not None
    shown = [tokenizer.decode(ids, skip_special_tokens=False) for ids in (budget.begin, budget.end)]
    assert (budget.num_tokens, budget.is_open, shown) == (7, False, ["<|channel|>analysis<|message|>", "<|end|>"])


@pytest.mark.parametrize(
    ("parsers", "content", "reasoning", "num_calls"),
    [
        (("off", None), None, f"Hot?\n{ROME}", 0),
        ((None, "off"), "Hot?", None, 1),
        (("off", "off"), f"analysisHot?assistantcommentary to=functions.get_weather json{ROME}", None, 0),
        (("hermes", None), None, f"Hot?\n{ROME}", 0),
    ],
    ids=["no calls", "no reasoning", "neither", "another format"],
)
async def test_parsers_can_be_turned_off(
    with_parsers: WithParsers,
    parsers: tuple[str | None, str | None],
    content: str | None,
    reasoning: str | None,
    num_calls: int,
) -> None:
    async with with_parsers(*parsers) as gateway:
        answers(gateway, THOUGHT + CALL, end="<|call|>")
        for completion in await asked(gateway, tools=[WEATHER]):
            message = completion.choices[0].message
            assert (message.content or None, getattr(message, "reasoning", None)) == (content, reasoning)
            assert len(message.tool_calls or ()) == num_calls


async def test_nothing_is_parsed_without_the_special_tokens(
    accounts: Database, tokenizer: ModelTokenizer, threads: ThreadPoolExecutor, anyio_backend: str
) -> None:
    settings = GatewaySettings(base_parsers=AnswerParsers("harmony", "harmony"))
    async with open_gateway(accounts, tokenizer, threads, settings) as gateway:
        text = f"{FINAL}Hi"
        gateway.engine.script = lambda add: Script(token_ids=tokenizer.encode(text, add_special_tokens=False))
        completion = await gateway.openai.chat.completions.create(model="base", messages=ASKED)
        assert completion.choices[0].message.content == text


async def test_schema_of_a_strict_tool_is_checked(gateway: Gateway) -> None:
    endless = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": endless}}
    body = {"model": "base", "messages": ASKED, "tools": [tool]}
    response = await gateway.http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools[0].function.parameters"), json.dumps(error)
