"""A program's conversations become the prompts of the same requests to a server."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from loramux.adapter_store.formats.version_files.answer_parsers import NO_CHOICE
from loramux.adapter_store.formats.version_files.generation_config import NO_DEFAULTS
from loramux.adapter_store.formats.version_files.tokenizer_files import one_template, template_sources
from loramux.engine.chat_templates.chat_template import ChatTemplate
from loramux.engine.chat_templates.messages import IGNORED_FIELDS
from loramux.engine.chat_templates.template_refused import TemplateRefused
from loramux.engine.offline.local_template import LocalTemplate, adapter_template, listed_chats
from loramux.platform.accounts.version_settings import VersionSettings
from loramux.platform.bodies.chat_request import ChatRequest
from loramux.platform.bodies.conversation import ChatMessage
from loramux.platform.errors import InvalidRequest
from loramux.platform.requests.chat_prompt import ChatPrompts
from loramux.platform.tokenizer.tenant_templates import TenantTemplates
from tests.conformance.chat_templates import CALLED, CASES, PARTS, RESULT, TOOLS, USER
from tests.demo_base import DEMO_BASE
from tests.engine.chat_templates import templates
from tests.platform.tool_base import TEMPLATE

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
NULLS = {"name": None, "tool_calls": None, "tool_call_id": None, "refusal": None, "annotations": []}
TURNED = {
    "function": {"parameters": {"type": "object", "default": None}, "strict": None, "name": "f"},
    "type": "function",
}
MORE: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "several systems": (
        [{"role": "system", "content": "A"}, {"role": "developer", "content": PARTS["content"]}, USER],
        {},
    ),
    "long IDs": ([USER, json.loads(json.dumps(CALLED).replace("call00001", "call_of_a_client"))], {"tools": TOOLS}),
    "a result without a call": ([USER, RESULT], {"tools": TOOLS}),
    "null fields": ([{**USER, **NULLS}], {}),
    "fields without effect": ([{**USER, **{name: [1] for name in IGNORED_FIELDS}}], {}),
    "a tool with other fields first": ([USER], {"tools": [TURNED]}),
    "reasoning of a user": ([{**USER, "reasoning": "x"}], {}),
    "no content": ([{"role": "user"}], {}),
    "a reserved variable": ([USER], {"kwargs": {"messages": []}}),
}
SOURCES = {
    **templates.TEMPLATES,
    "tools": TEMPLATE,
    "parts": templates.PARTS,
    "either": templates.EITHER,
    "by role": templates.BY_ROLE,
    "first part": templates.FIRST_PART,
}


def with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages as OpenAI's API has them. In transformers, arguments are objects."""
    changed: list[dict[str, Any]] = json.loads(json.dumps(messages))
    for call in (call for message in changed for call in message.get("tool_calls") or ()):
        if not isinstance(call["function"]["arguments"], str):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return changed


def request(messages: list[dict[str, Any]], options: dict[str, Any]) -> ChatRequest:
    fields = dict(options)
    body = {"model": "base", "messages": messages, "chat_template_kwargs": fields.pop("kwargs", None), **fields}
    return ChatRequest.model_validate(body)


def on_server(prompts: ChatPrompts, messages: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    try:
        return prompts.render(request(messages, options), NO_CHOICE).text
    except (InvalidRequest, ValidationError):
        return None


def in_program(template: LocalTemplate, messages: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    fields = {"add_generation_prompt": True, "continue_final_message": False, **options}
    try:
        return template.render(messages, fields.pop("tools", None), fields.pop("kwargs", None), **fields)
    except TemplateRefused:
        return None


@pytest.mark.parametrize("name", SOURCES)
def test_prompts_equal_those_of_a_server(name: str) -> None:
    template = ChatTemplate({"default": SOURCES[name]}, SPECIAL_TOKENS)
    ours, num_equal = LocalTemplate(lambda: template), 0
    with closing(TenantTemplates(SPECIAL_TOKENS)) as tenants:
        prompts = ChatPrompts(template, tenants)
        for case, (messages, options) in {**CASES, **MORE}.items():
            sent = with_text_arguments(messages)
            expected = on_server(prompts, sent, options)
            for given in (messages, sent):
                assert in_program(ours, given, options) == expected, case
            num_equal += expected is not None
    assert num_equal > 10


def test_an_adapters_prompts_equal_those_of_a_server() -> None:
    ours, num_equal = adapter_template(TEMPLATE, SPECIAL_TOKENS), 0
    settings = VersionSettings(TEMPLATE, NO_DEFAULTS)
    with closing(TenantTemplates(SPECIAL_TOKENS)) as tenants:
        prompts = ChatPrompts(None, tenants)
        for case, (messages, options) in MORE.items():
            sent = with_text_arguments(messages)
            try:
                expected = asyncio.run(prompts.render_with("tenant", settings, request(sent, options))).text
            except (InvalidRequest, ValidationError):
                expected = None
            assert in_program(ours, sent, options) == expected, case
            num_equal += expected is not None
    assert num_equal > 4


def test_the_fields_that_are_ignored_are_those_of_a_server() -> None:
    assert {name for name, field in ChatMessage.model_fields.items() if field.annotation is Any} == IGNORED_FIELDS


def test_prompts_with_several_templates_equal_those_of_a_server(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(templates.EITHER)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATE)
    loaded = ChatTemplate.load(tmp_path)
    assert loaded is not None
    of_base = LocalTemplate(lambda: loaded)
    of_adapter = adapter_template(one_template(template_sources(tmp_path, {})), {})
    with closing(TenantTemplates({})) as tenants:
        prompts = ChatPrompts(loaded, tenants)
        for options in ({}, {"tools": TOOLS}):
            expected = on_server(prompts, [USER], options)
            assert expected is not None
            assert in_program(of_base, [USER], options) == expected == in_program(of_adapter, [USER], options)


@pytest.fixture(scope="module")
def template() -> LocalTemplate:
    loaded = ChatTemplate.load(DEMO_BASE)
    assert loaded is not None
    return LocalTemplate(lambda: loaded)


@pytest.mark.parametrize(
    ("messages", "tools", "message"),
    [
        ([], None, "there are no messages"),
        (["Hello"], None, r"messages\[0\]: Expected `object`, got `str`"),
        ([USER, {"role": "wizard", "content": "x"}], None, r"messages\[1\]\.role must be one of system, .* 'wizard'"),
        ([{"content": "x"}], None, r"messages\[0\]\.role must be one of"),
        ([{"role": "user"}], None, r"messages\[0\]\.content is required"),
        ([{**USER, "colour": "x"}], None, r"messages\[0\]: Object contains unknown field `colour`"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            None,
            r"\[0\]\.content\[0\]\.type: Invalid value 'image",
        ),
        ([USER, RESULT], None, r"messages\[1\]\.tool_call_id: no earlier message has a tool call with this id"),
        ([USER, {"role": "assistant", "content": "", "tool_calls": [{}]}], None, r"\[1\]\.tool_calls\[0\]: .* `id`"),
        ([USER], TOOLS, "chat template does not support tools"),
        ([USER], [{"name": "f"}], r"tools\[0\]: Object contains unknown field `name`"),
        (
            [USER],
            [{"type": "function", "function": {"name": "f", "parameters": {"type": len}}}],
            r"tools\[0\]: Encoding objects of type builtin",
        ),
        ([USER], [len], r"tools\[0\]: "),
        (
            [{**USER, "tool_calls": np.array([{}, {}])}],
            None,
            r"\[0\]\.tool_calls: Expected `array.*`, got `numpy",
        ),
        ([{"role": "tool", "content": "x"}], None, "no earlier message"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"x": len}}}]}],
            None,
            r"messages\[0\]: Encoding objects of type builtin",
        ),
    ],
    ids=[
        *("nothing", "text", "role", "no role", "no content", "unknown field", "image", "result", "call"),
        *("tools", "flat tool", "no JSON", "function", "array", "no call", "arguments"),
    ],
)
def test_a_conversation_that_cannot_be_rendered_is_refused_with_its_place(
    template: LocalTemplate, messages: Any, tools: Any, message: str
) -> None:
    with pytest.raises(TemplateRefused, match=message):
        template.render(messages, tools, None, add_generation_prompt=True, continue_final_message=False)


def test_the_objects_of_a_client_are_messages(template: LocalTemplate) -> None:
    """OpenAI's client returns answers as objects."""
    answer = SimpleNamespace(role="assistant", content="Hi", tool_calls=None, refusal=None, parsed=None)
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": False}
    given: Any = [USER, answer]
    assert template.render(given, None, None, **options).endswith("<|assistant|>Hi<|end|>")


def test_a_malformed_template_of_an_adapter_is_refused_when_it_is_used() -> None:
    malformed = adapter_template("{% for %}", {})
    with pytest.raises(TemplateRefused, match="the adapter's chat template is malformed: "):
        malformed.render([USER], None, None, add_generation_prompt=True, continue_final_message=False)


def test_one_conversation_differs_from_several() -> None:
    assert listed_chats([USER]) == [[USER]]
    assert listed_chats([[USER], (USER,)]) == [[USER], (USER,)]
    assert listed_chats([]) == []
    column: Any = np.array([USER, USER])
    assert listed_chats(column) == [[USER, USER]]
    assert [one is column for one in listed_chats([column, column])] == [True, True]
    for given in ("Hello", USER):
        with pytest.raises(ValueError, match="messages is a list"):
            listed_chats(given)  # type: ignore[arg-type]
