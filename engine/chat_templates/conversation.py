"""One conversation as a chat template sees it. It is rendered as transformers' `apply_chat_template` renders it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import Template

from loramux.engine.chat_templates.harmony_channel import HARMONY_CHANNEL
from loramux.engine.chat_templates.jinja_sandbox import ChatEnvironment, RaisedByTemplate
from loramux.engine.chat_templates.template_kwargs import check_kwargs
from loramux.engine.chat_templates.template_refused import TemplateRefused

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which templates read a message's reasoning. Most templates read the first."""

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the message to continue. transformers uses the same mark, and some templates look for it. The
trailing space shows whether the template strips messages.
"""

_MAX_REASON_CHARS = 500

_REPRESENTATION = re.compile(r"<[A-Za-z_].*>", re.DOTALL)
"""Matches objects' representations in the message of an error of Python or Jinja."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Additional variables of the template."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        """Raise TemplateRefused if there are no messages, the options contradict each other, or `kwargs` exceed a
        limit.
        """
        check_kwargs(self.kwargs)
        if not self.messages:
            raise TemplateRefused("there are no messages")
        if self.continue_final_message and self.add_generation_prompt:
            raise TemplateRefused(
                "continue_final_message needs add_generation_prompt to be false", "continue_final_message"
            )


def render(
    environment: ChatEnvironment,
    template: Template,
    source: str,
    special_tokens: Mapping[str, str],
    conversation: Conversation,
) -> str:
    """Render a conversation with `template`, which was compiled from `source`. Raises TemplateRefused."""
    # The templates of gpt-oss read messages more strictly than others.
    has_channels = HARMONY_CHANNEL in source
    messages = [_message(message, has_channels) for message in conversation.messages]
    tools = None if conversation.tools is None else list(conversation.tools)
    if tools is not None and has_channels:
        tools = [_described(tool) for tool in tools]
    if tools is not None and "parameters.properties" in source:
        tools = [_with_properties(tool) for tool in tools]
    final = _tag_final(messages, source) if conversation.continue_final_message else None
    variables = {
        "documents": None,
        **conversation.kwargs,
        **special_tokens,
        "messages": messages,
        "tools": tools,
        "add_generation_prompt": conversation.add_generation_prompt,
    }
    try:
        text = environment.text(template, variables)
    except Exception as error:  # a template can raise anything
        raise TemplateRefused(f"the chat template rejects these messages: {reason(error)}") from None
    return text if final is None else _cut_after(final, text)


def reason(error: BaseException) -> str:
    """Return an error's message without objects' representations, or its type if it has no message."""
    message = str(error)
    if not isinstance(error, RaisedByTemplate):
        message = _REPRESENTATION.sub("an object", message)
    return message[:_MAX_REASON_CHARS].encode(errors="replace").decode() or type(error).__name__


def _described(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add an empty description to a function without one, which OpenAI's API allows but gpt-oss's template does not."""
    return {**tool, "function": {"description": "", **tool["function"]}} if "function" in tool else tool


def _with_properties(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add empty `properties` to the schema of a function without arguments. OpenAI's API does not require them, but
    Seed-OSS's template does.
    """
    if "function" not in tool:
        return tool
    parameters = tool["function"].get("parameters") or {"type": "object"}
    if "properties" in parameters:
        return tool
    return {**tool, "function": {**tool["function"], "parameters": {**parameters, "properties": {}}}}


def _message(message: Mapping[str, Any], has_channels: bool) -> dict[str, Any]:
    """Drop null fields, which many templates would print, and copy the reasoning to the names that templates read."""
    shown = {name: value for name, value in message.items() if value is not None}
    reasoning = next((shown[name] for name in _REASONING_FIELDS if name in shown), None)
    if reasoning is None:
        return shown
    if has_channels and shown.get("content") and shown.get("tool_calls"):
        # gpt-oss's template refuses a message with calls that has both content and `thinking`.
        return {**shown, "reasoning_content": reasoning}
    return {"thinking": reasoning, **shown, "reasoning_content": reasoning}


def _tag_final(messages: list[dict[str, Any]], source: str) -> str:
    """Append the tag to the text of the last message. Return the text without it."""
    content = messages[-1].get("content")
    if "content" not in source:
        raise TemplateRefused(
            "the chat template does not read messages' content, so no message can be continued",
            "continue_final_message",
        )
    if isinstance(content, str):
        messages[-1]["content"] = content + _TAG
        return content
    if isinstance(content, list):
        for i, part in reversed(list(enumerate(content))):
            if isinstance(part, dict) and isinstance(text := part.get("text"), str):
                messages[-1]["content"] = [*content[:i], {**part, "text": text + _TAG}, *content[i + 1 :]]
                return text
    raise TemplateRefused("the last message has no text to continue", "continue_final_message")


def _cut_after(final: str, text: str) -> str:
    end = text.rfind(_TAG.strip())
    if end < 0 or final.strip() not in text:
        raise TemplateRefused(
            "the chat template does not render the whole final message, so it cannot be continued",
            "continue_final_message",
        )
    # A template that strips messages also strips the space at the end of the tag.
    return text[:end] if text.startswith(_TAG, end) else text[:end].rstrip()
