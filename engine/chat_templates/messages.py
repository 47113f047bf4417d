"""The messages and tools of a conversation, in the form that a chat template reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from loramux.adapter_store.formats.files.strict_json import InvalidJson, parse_strict_json
from loramux.engine.chat_templates.content_form import Content, ContentForms, formed_content, joined_content
from loramux.engine.chat_templates.template_check import TemplateFeatures
from loramux.engine.chat_templates.template_refused import TemplateRefused

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]

IGNORED_FIELDS = frozenset(
    {"parsed", "provider_specific_fields", "thinking_blocks", "reasoning_details", "cache_control"}
)
"""Fields that clients add to messages, and that have no effect."""

_PASSED_ID = re.compile("(?=.*[a-zA-Z])[a-zA-Z0-9]{9}")
"""The IDs that chat templates get as they are. IDs without a letter would be like the numbers that replace others."""


class TextPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str | dict[str, Any]
    """JSON text, or the object itself."""


class Call(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    function: CalledFunction


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message, with the fields of OpenAI's API that reach a template."""

    role: Role
    content: str | tuple[str | TextPart, ...] | None = None
    name: str | None = None
    tool_calls: tuple[Call, ...] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def texts(self) -> Content:
        """The content as a text, or as the texts of its parts."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return tuple(part if isinstance(part, str) else part.text for part in self.content) or ""


def template_arguments(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, features: TemplateFeatures | None
) -> dict[str, Any]:
    """Return the arguments `messages` and `tools` for the `render` of a template with these features.

    `features` is None if the template does not render a plain conversation. Raises TemplateRefused as
    `template_messages` does, and for tools that the template would not show.
    """
    if tools and (features is None or not features.tools):
        raise TemplateRefused("this model's chat template does not support tools", "tools", "unsupported_parameter")
    as_text = features is not None and features.arguments_as_text
    forms = ContentForms() if features is None else features.content
    return {"messages": template_messages(messages, forms, arguments_as_text=as_text), "tools": tools or None}


def template_messages(
    messages: Sequence[Message], forms: ContentForms, *, arguments_as_text: bool = False
) -> list[dict[str, Any]]:
    """Convert messages to dicts for a chat template, with contents in the form that it reads, and with the arguments of
    tool calls as objects or as text.

    System messages at the start become one, because many templates allow only one. IDs of calls become numbers unless
    they consist of nine letters and digits, because Mistral's templates refuse all others.

    Raises TemplateRefused for missing content, for fields that do not suit a message's role, and for tool messages that
    answer no earlier call.
    """
    calls: dict[str, tuple[str, str]] = {}
    shown = [
        _message(message, f"messages[{index}]", calls, forms, arguments_as_text)
        for index, message in enumerate(messages)
    ]
    num_leading = next((index for index, one in enumerate(shown) if one["role"] != "system"), len(shown))
    if num_leading > 1:
        content = joined_content(message.texts for message in messages[:num_leading])
        shown[:num_leading] = [{**shown[0], "content": formed_content(forms.of("system"), content)}]
    return shown


def _message(
    message: Message, param: str, calls: dict[str, tuple[str, str]], forms: ContentForms, as_text: bool
) -> dict[str, Any]:
    """Convert one message. `calls` maps the ID of each earlier call to the template's ID and the function's name."""
    # "developer" is OpenAI's newer name for the system role. Chat templates use the older one.
    role = "system" if message.role == "developer" else message.role
    # An answer can have reasoning or calls alone, and a function can return nothing.
    if message.content is None and role not in ("assistant", "tool"):
        raise TemplateRefused(f"{param}.content is required", f"{param}.content", "missing_required_parameter")
    _check_role(message, param)
    shown: dict[str, Any] = {"role": role, "content": formed_content(forms.of(role), message.texts)}
    if message.name is not None:
        shown["name"] = message.name
    if role == "tool":
        call_id = message.tool_call_id
        if call_id not in calls:
            raise TemplateRefused(
                "no earlier message has a tool call with this id",
                f"{param}.tool_call_id",
                "missing_required_parameter" if call_id is None else "invalid_value",
            )
        # Some templates show the function's name with its result.
        shown["tool_call_id"], shown["name"] = calls[call_id]
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        shown["reasoning_content"] = reasoning
    if message.tool_calls:
        for call in message.tool_calls:
            known = calls.get(call.id)
            new_id = call.id if _PASSED_ID.fullmatch(call.id) else f"{len(calls):09d}"
            calls[call.id] = (known[0] if known else new_id, call.function.name)
        shown["tool_calls"] = [_call(call, calls[call.id][0], as_text) for call in message.tool_calls]
    return shown


def _check_role(message: Message, param: str) -> None:
    """Raise TemplateRefused if a field belongs to another role."""
    for role, fields in (("assistant", ("tool_calls", "reasoning_content", "reasoning")), ("tool", ("tool_call_id",))):
        found = next((name for name in fields if getattr(message, name) not in (None, ())), None)
        if found is not None and message.role != role:
            raise TemplateRefused(f"only {role} messages have {found}", f"{param}.{found}")


def _call(call: Call, shown_id: str, as_text: bool) -> dict[str, Any]:
    given = call.function.arguments
    shown: str | dict[str, Any]
    if as_text:
        shown = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    else:
        shown = _arguments(given) if isinstance(given, str) else given
    return {"id": shown_id, "type": "function", "function": {"name": call.function.name, "arguments": shown}}


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object, which most templates require.

    An answer can be cut off inside the arguments, and a model can write malformed ones. The server returns both as they
    are, and a conversation must be able to continue with them. Such text becomes the value of the key `arguments`.
    """
    try:
        arguments = parse_strict_json(text.encode() or b"{}", are_keys_unique=False)
    except InvalidJson:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": text}
