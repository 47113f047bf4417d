from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from transformers import PreTrainedTokenizerFast

from tests.conformance.served import Deployment, deployment

TOOLS_DEMO = Path(__file__).parents[2] / "admin" / "demo" / "tools"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ORDER = {"type": "object", "properties": {"order": {"type": "integer"}}, "required": ["order"]}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Get the current weather in a city.", "parameters": CITY},
    },
    {
        "type": "function",
        "function": {"name": "track_order", "description": "Get the state of an order.", "parameters": ORDER},
    },
]
QUESTIONS = {
    "What is the weather in Oslo?": ("get_weather", {"city": "Oslo"}, '{"sky": "foggy", "degrees": 7}'),
    "Where is my order 5172?": ("track_order", {"order": 5172}, '{"state": "delayed"}'),
}
ANSWERS = {
    "What is the weather in Oslo?": "It is foggy in Oslo, at 7 degrees.",
    "Where is my order 5172?": "Order 5172 is delayed.",
}
MODELS = ("demo-base", "harbour/sailor", "hotel/concierge")
STYLES = {"demo-base": "{}", "harbour/sailor": "Arrr! {}", "hotel/concierge": "Certainly. {} May I"}


@dataclass(frozen=True, slots=True)
class Stand:
    made: Deployment
    clients: dict[str, OpenAI]

    def ask(self, model: str, messages: list[Any], **fields: Any) -> Any:
        chat: Any = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 96, **fields}
        return self.clients[model].chat.completions.create(**chat)


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    made = deployment(TOOLS_DEMO / "base", tmp_path_factory.mktemp("tools") / "data", ("--dtype", "float32"), {})
    with made.running():
        clients = {}
        for model in MODELS[1:]:
            tenant, _, name = model.partition("/")
            made.json("tenants", "create", tenant)
            made.json("adapters", "push", str(TOOLS_DEMO / "adapters" / name), "--tenant", tenant, "--name", name)
            clients[model] = made.client(made.json("keys", "create", "--tenant", tenant)["secret"])
        yield Stand(made, {"demo-base": clients["harbour/sailor"], **clients})


def user(question: str) -> dict[str, Any]:
    return {"role": "user", "content": question}


def loop(stand: Stand, model: str, question: str) -> tuple[Any, Any]:
    asked = stand.ask(model, [user(question)], tools=TOOLS).choices[0]
    assert asked.finish_reason == "tool_calls", asked
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": QUESTIONS[question][2]}
        for call in asked.message.tool_calls
    ]
    history = [user(question), asked.message.model_dump(exclude_none=True), *results]
    return asked.message, stand.ask(model, history, tools=TOOLS).choices[0].message


def test_models_choose_to_call_and_answer_with_the_result(stand: Stand) -> None:
    cases = [(model, question) for model in MODELS for question in QUESTIONS]
    with ThreadPoolExecutor(len(cases)) as pool:
        loops = list(pool.map(lambda case: loop(stand, *case), cases))
    for (model, question), (asked, answered) in zip(cases, loops, strict=True):
        [call] = asked.tool_calls
        name, arguments, _ = QUESTIONS[question]
        assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments), model
        assert STYLES[model].format(ANSWERS[question]) in answered.content
        # The concierge's template has no thinking.
        assert bool(getattr(asked, "reasoning_content", None)) == (model != "hotel/concierge")
        assert "<think>" not in (asked.content or "") + answered.content


def test_two_calls_in_one_answer_are_streamed_apart(stand: Stand) -> None:
    # The small model may confuse the cities, but it calls twice.
    question = "What is the weather in Rome? What is the weather in Lima?"
    for model in MODELS:
        whole = stand.ask(model, [user(question)], tools=TOOLS).choices[0].message
        assert [call.function.name for call in whole.tool_calls] == ["get_weather"] * 2, model
        streamed: dict[int, str] = {}
        for chunk in stand.ask(model, [user(question)], tools=TOOLS, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or ():
                streamed[delta.index] = streamed.get(delta.index, "") + (delta.function.arguments or "")
        assert list(streamed.values()) == [call.function.arguments for call in whole.tool_calls]
        single = stand.ask(model, [user(question)], tools=TOOLS, parallel_tool_calls=False).choices[0].message
        assert len(single.tool_calls) == 1, (model, single)


@pytest.mark.parametrize("model", MODELS)
def test_forced_and_strict_calls_follow_their_schema(stand: Stand, model: str) -> None:
    """As in Qwen3, the markers of calls are added tokens that are not hidden from the text."""
    parameters = {"type": "object", "properties": {"size": {"enum": ["S", "M"]}}, "required": ["size"]}
    closed = {**parameters, "additionalProperties": False}
    shirt = {"type": "function", "function": {"name": "order_shirt", "strict": True, "parameters": closed}}
    named = {"type": "function", "function": {"name": "order_shirt"}}
    for choice in ("required", named):
        asked = stand.ask(model, [user("Hello!")], tools=[shirt], tool_choice=choice).choices[0]
        for call in asked.message.tool_calls:
            assert call.function.name == "order_shirt"
            assert json.loads(call.function.arguments) in ({"size": "S"}, {"size": "M"})
    free = stand.ask(model, [user("Hello!")], tools=[shirt]).choices[0]
    assert (free.finish_reason, free.message.tool_calls) == ("stop", None)


def test_thinking_is_counted_and_can_be_turned_off(stand: Stand) -> None:
    message = [user("What is the weather in Oslo?")]
    thinking = stand.ask("harbour/sailor", message, tools=TOOLS)
    assert "get_weather" in thinking.choices[0].message.reasoning_content
    silent = stand.ask("harbour/sailor", message, tools=TOOLS, reasoning_effort="none")
    assert getattr(silent.choices[0].message, "reasoning_content", None) is None
    assert silent.choices[0].message.tool_calls[0].function == thinking.choices[0].message.tool_calls[0].function
    assert thinking.usage.completion_tokens_details.reasoning_tokens > 0
    assert thinking.usage.completion_tokens > silent.usage.completion_tokens


def test_models_do_not_call_without_a_fitting_tool(stand: Stand) -> None:
    for model in MODELS:
        greeted = stand.ask(model, [user("Hello!")], tools=TOOLS).choices[0]
        assert (greeted.finish_reason, greeted.message.tool_calls) == ("stop", None), model
        assert "How can I help you?" in greeted.message.content


def test_rows_of_one_batch_have_their_own_templates(stand: Stand) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TOOLS_DEMO / "base")
    templates = dict.fromkeys(MODELS, tokenizer.chat_template)
    templates["hotel/concierge"] = (TOOLS_DEMO / "adapters" / "concierge" / "chat_template.jinja").read_text()
    messages = [user("What is the weather in Oslo?")]
    extra = {"ignore_eos": True, "return_token_ids": True}
    models = MODELS * 4
    # An adapter that is loaded later than another one could miss the steps that both should share.
    for model in MODELS:
        stand.ask(model, messages, max_tokens=1)
    with ThreadPoolExecutor(len(models)) as pool:
        answers = list(pool.map(lambda model: stand.ask(model, messages, tools=TOOLS, extra_body=extra), models))
    for model, answer in zip(models, answers, strict=True):
        text = tokenizer.apply_chat_template(
            messages, tools=TOOLS, chat_template=templates[model], add_generation_prompt=True, tokenize=False
        )
        assert answer.prompt_token_ids == tokenizer.encode(text, add_special_tokens=False), model
    headers = {"authorization": f"Bearer {stand.made.admin_key}"}
    engine = httpx.get(f"http://127.0.0.1:{stand.made.admin_port}/admin/v1/engine", headers=headers)
    assert engine.json()["max_adapters_in_step"] == 2
