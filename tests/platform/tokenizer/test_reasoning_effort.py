from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest

from loramux.adapter_store.formats.version_files.answer_parsers import NO_CHOICE
from loramux.engine.chat_templates.chat_template import ChatTemplate
from loramux.engine.chat_templates.conversation import Conversation
from loramux.engine.chat_templates.reasoning_effort import EFFORTS, nearest_effort
from loramux.engine.chat_templates.template_check import check_template
from loramux.platform.bodies.chat_request import ChatRequest
from loramux.platform.errors import InvalidRequest
from loramux.platform.messages_api.message_request import MessagesRequest
from loramux.platform.requests.chat_prompt import ChatPrompts
from loramux.platform.tokenizer.tenant_templates import TenantTemplates

ASKED = [{"role": "user", "content": "Hi"}]
USER = "{{ messages[0].content }}"
SWITCH = (
    USER
    + """\
{%- set effort = reasoning_effort | default('none') %}
{%- if effort not in ['none', 'high'] %}{{- raise_exception('reasoning_effort must be none or high') }}{%- endif %}
{{- ' [' ~ effort ~ ']' }}"""
)
"""A switch, as in the templates of Mistral Small 4 and Mistral Medium 3.5."""
PRINTED = USER + "{{ ' Reasoning: ' ~ (reasoning_effort | default('medium')) | title }}"
"""Any effort is printed, as in the template of gpt-oss."""
BRANCHES = (
    USER
    + """\
{%- if reasoning_effort == 'low' %}{{- ' Be quick.' }}
{%- elif reasoning_effort in ['high', 'max'] %}{{- ' Think hard: ' ~ reasoning_effort }}{%- endif %}"""
)
LISTED = (
    USER
    + """\
{%- if reasoning_effort in ['low', 'medium', 'high'] %} <think:{{ reasoning_effort }}>{% else %} </think>{% endif %}"""
)
"""Thinking is off unless the template gets an effort that it knows."""
NO_THINK = (
    USER
    + """\
{%- if reasoning_effort in ['low', 'high'] %}{{- ' ' ~ reasoning_effort }}{% else %} no_think{% endif %}"""
)
HIGHEST = (
    USER
    + """\
{%- if reasoning_effort == 'low' %} L{% elif reasoning_effort == 'medium' %} M{% else %} H{% endif %}"""
)
"""Any unknown effort is the highest one."""
WITH_SWITCH = USER + "{% if enable_thinking %} <{{ reasoning_effort | default('medium') }}>{% endif %}"
UNREAD = (
    USER
    + """\
{%- if reasoning_effort is defined and reasoning_effort not in ['none', 'low'] %}
    {{- raise_exception('unknown effort') }}
{%- endif %}"""
)


def efforts_of(source: str) -> tuple[str, ...]:
    return ChatTemplate({"default": source}, {}).features().reasoning_efforts


@pytest.mark.parametrize(
    ("source", "efforts"),
    [
        pytest.param(SWITCH, ("none", "high"), id="switch"),
        pytest.param(PRINTED, ("low", "medium", "high"), id="printed"),
        pytest.param(BRANCHES, ("none", "low", "medium", "high", "max"), id="branches"),
        pytest.param(LISTED, ("none", "low", "medium", "high"), id="listed"),
        pytest.param(NO_THINK, ("none", "low", "medium", "high"), id="no-think"),
        pytest.param(HIGHEST, ("none", "low", "medium", "high"), id="highest"),
        pytest.param(USER, (), id="not-read"),
        pytest.param(UNREAD, (), id="checked-and-not-read"),
        pytest.param(
            USER + "{% if reasoning_effort == 'none' %} /no_think{% endif %}",
            ("none", "low", "medium", "high"),
            id="off",
        ),
    ],
)
def test_efforts_that_a_template_knows_are_found(source: str, efforts: tuple[str, ...]) -> None:
    assert efforts_of(source) == efforts


def prompt(source: str, body: ChatRequest) -> str:
    with closing(TenantTemplates({})) as tenants:
        return ChatPrompts(ChatTemplate({"default": source}, {}), tenants).render(body, NO_CHOICE).text


def chat(source: str, effort: str | None) -> str:
    body = {"model": "base", "messages": ASKED, "reasoning_effort": effort}
    return prompt(source, ChatRequest.model_validate(body))


def messages(source: str, effort: str | None, thinking: str = "adaptive") -> str:
    body: dict[str, Any] = {"model": "base", "messages": ASKED, "max_tokens": 9, "thinking": {"type": thinking}}
    return prompt(source, MessagesRequest.model_validate({**body, "output_config": {"effort": effort}}).chat())


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        pytest.param(SWITCH, ["none", *["high"] * 6], id="switch"),
        pytest.param(PRINTED, ["Low", "Low", "Low", "Medium", "High", "High", "High"], id="printed"),
        pytest.param(
            LISTED,
            ["</think>", *(f"<think:{effort}>" for effort in ("low", "low", "medium", "high", "high", "high"))],
            id="listed",
        ),
        pytest.param(NO_THINK, ["no_think", "low", "low", "no_think", "high", "high", "high"], id="no-think"),
        pytest.param(HIGHEST, ["H", "L", "L", "M", "H", "H", "H"], id="highest"),
    ],
)
def test_a_request_gets_the_nearest_effort(source: str, shown: list[str]) -> None:
    assert [chat(source, effort).split()[-1].strip("[]") for effort in EFFORTS] == shown
    assert [messages(source, effort).split()[-1].strip("[]") for effort in ("low", "xhigh", "max")] == [
        *(shown[2], shown[5], shown[6]),
    ]


def test_a_template_that_does_not_think_by_default_thinks_in_a_messages_request_that_asks_for_it() -> None:
    assert messages(SWITCH, None) == "Hi [high]"
    assert messages(SWITCH, None, "disabled") == "Hi [none]"
    assert (messages(LISTED, None), messages(LISTED, None, "disabled")) == ("Hi <think:high>", "Hi </think>")
    assert messages(PRINTED, None) == "Hi Reasoning: Medium"
    assert (messages(BRANCHES, None), messages(HIGHEST, None)) == ("Hi", "Hi H")


def test_a_switch_turns_thinking_off_without_an_effort() -> None:
    source = "{% set enable_thinking = enable_thinking | default(true) %}" + WITH_SWITCH
    shown = [chat(source, effort) for effort in (None, "none", "low", "max")]
    assert shown == ["Hi <medium>", "Hi", "Hi <low>", "Hi <high>"]


def test_an_effort_that_changes_nothing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="does not use reasoning_effort"):
        chat(USER, "max")
    assert chat(USER, "none") == messages(USER, "max") == "Hi"


@pytest.mark.parametrize(("source", "reads_effort"), [(USER, False), (USER + "{# reasoning_effort #}", True)])
def test_only_templates_that_read_an_effort_are_rendered_with_one(source: str, reads_effort: bool) -> None:
    rendered: list[str] = []

    def render(conversation: Conversation) -> str:
        rendered.extend(conversation.kwargs.keys() & {"reasoning_effort"})
        return str(conversation.messages[0]["content"])

    assert check_template(render, source).reasoning_efforts == ()
    assert bool(rendered) == reads_effort


def test_no_effort_is_nearest_to_none_but_none() -> None:
    assert nearest_effort(("none",), "high") is None
    assert nearest_effort((), "none") is None
