"""Renders a conversation into a prompt, and derives from the chat template how the model's answer is to be read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import meta

from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.plan import Reasoning
from loramux.platform.openai_api.conversation import template_messages
from loramux.platform.openai_api.schemas import ChatRequest
from loramux.platform.tokenizer.chat_template import ChatTemplate
from loramux.platform.tokenizer.jinja_sandbox import ChatEnvironment
from loramux.platform.tool_calls.detection import is_thinking_open, parser_name_of, reasoning_markers_of
from loramux.platform.tool_calls.reasoning import Markers

THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Names under which templates read whether the model thinks before it answers."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes tool calls and reasoning, as far as its chat template shows it."""

    tool_format: str | None
    reasoning: Markers | None
    variables: frozenset[str]
    """The variables that the template reads."""


@lru_cache(maxsize=256)
def answer_format(source: str) -> AnswerFormat:
    variables = meta.find_undeclared_variables(ChatEnvironment().parse(source))
    return AnswerFormat(parser_name_of(source), reasoning_markers_of(source), frozenset(variables))


def render_chat(template: ChatTemplate, body: ChatRequest) -> str:
    """The text of a request's prompt. Raises InvalidRequest."""
    tools = [tool.model_dump(exclude_none=True) for tool in body.offered_tools] or None
    style = answer_format(template.source(has_tools=tools is not None))
    if tools is not None and "tools" not in style.variables:
        raise InvalidRequest(
            "this model's chat template does not show tools", param="tools", code="unsupported_parameter"
        )
    return template.render(
        template_messages(body.messages),
        tools=tools,
        kwargs=_kwargs(style, body),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
    )


def reasoning_after(text: str, style: AnswerFormat) -> Reasoning | None:
    """How the answer to this prompt is divided; None if it contains no reasoning."""
    markers = style.reasoning
    if markers is None or text.rstrip().endswith(markers.end):
        return None
    return Reasoning(markers, is_open=is_thinking_open(text, markers))


def _kwargs(style: AnswerFormat, body: ChatRequest) -> dict[str, Any]:
    """The template's further variables; those that the request sets itself go before `reasoning_effort`."""
    effort, kwargs = body.reasoning_effort, body.chat_template_kwargs or {}
    if effort is None:
        return kwargs
    known: dict[str, Any] = {name: effort != "none" for name in THINKING_VARIABLES if name in style.variables}
    if "reasoning_effort" in style.variables:
        known["reasoning_effort"] = effort
    if not known and effort != "none":
        raise InvalidRequest(
            "this model's chat template does not know reasoning_effort",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    return {**known, **kwargs}
