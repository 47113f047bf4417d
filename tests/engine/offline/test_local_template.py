"""A program's conversations become the prompts of the same requests to a server."""

from __future__ import annotations

import json
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from loramux.adapter_store.formats.version_files.answer_parsers import NO_CHOICE
from loramux.engine.chat_templates.chat_template import ChatTemplate
from loramux.engine.chat_templates.template_refused import TemplateRefused
from loramux.engine.offline.local_template import LocalTemplate, adapter_template, listed_chats
from loramux.platform.bodies.chat_request import ChatRequest
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


def on_server(prompts: ChatPrompts, messages: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    fields = dict(options)
    body = {"model": "base", "messages": messages, "chat_template_kwargs": fields.pop("kwargs", None), **fields}
    try:
        return prompts.render(ChatRequest.model_validate(body), NO_CHOICE).text
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
        ([USER], [len], r"tools\[0\]: "),
        ([{"role": "tool", "content": "x"}], None, "no earlier message"),
    ],
    ids=[
        *("nothing", "text", "role", "no role", "no content", "unknown field", "image", "result", "call"),
        *("tools", "flat tool", "function", "no call"),
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
    for given in ("Hello", USER):
        with pytest.raises(ValueError, match="messages is a list"):
            listed_chats(given)  # type: ignore[arg-type]
