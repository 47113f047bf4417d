"""The messages of a chat request, in the form that chat templates expect."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, PlainValidator
from pydantic_core import PydanticKnownError
from typing_extensions import TypedDict

from loramux.adapter_store.formats.files.strict_json import InvalidJson, parse_strict_json
from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.bodies.text_fields import CalledName, encodable
from loramux.platform.errors import InvalidRequest
from loramux.platform.tokenizer.content_form import ContentForms, formed_content

MAX_ID_CHARACTERS = 256

_PASSED_ID = re.compile("(?=.*[a-zA-Z])[a-zA-Z0-9]{9}")
"""The IDs that chat templates get as they are. IDs without a letter would be like the numbers that replace others."""

PART_FIELDS = frozenset({"annotations", "logprobs", "cache_control", "prompt_cache_breakpoint"})
"""Fields of a text part without effect: two from answers, and two that tell other servers where to cache the prompt."""

Content: TypeAlias = str | tuple[str, ...]
"""A message's content: a string, or the texts of the content parts that the client sent."""


_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The types of supported content parts, each with the field that holds its text."""


class TextPart(TypedDict):
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str


def text_content(value: Any) -> Content:
    """Return the content of a message of the chat or the Responses API. vLLM also takes the parts of one in the other.

    Raises ValueError for parts that are not text.
    """
    if isinstance(value, str):
        return encodable(value)
    if not isinstance(value, list):
        raise PydanticKnownError("string_type")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in _TEXTS:
            shown = f", not {kind[:64]!r}" if isinstance(kind, str) else ""
            raise ValueError(f"the server reads only text, in parts of the types {', '.join(_TEXTS)}{shown}")
        text = part.get(_TEXTS[kind])
        if not isinstance(text, str):
            raise ValueError(f"a part of the type {kind} needs the string {_TEXTS[kind]}")
        unknown = next((name for name in part if name not in {"type", _TEXTS[kind], *PART_FIELDS}), None)
        if unknown is not None:
            raise ValueError(f"a part of the type {kind} has no field {unknown[:64]!r}")
        texts.append(encodable(text))
    return tuple(texts) or ""


def _optional_content(value: Any) -> Content | None:
    return None if value is None else text_content(value)


class CalledFunction(StrictModel):
    name: CalledName
    arguments: str
    parsed_arguments: Any = None
    """The OpenAI clients' helpers add this field to the calls that they send back. It has no effect."""
    provider_specific_fields: Any = None
    """litellm adds this field. It has no effect."""


class ToolCall(StrictModel):
    id: str = Field(min_length=1, max_length=MAX_ID_CHARACTERS)
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """The call's index in a streamed answer. Clients that join the chunks send it back. It has no effect."""
    provider_specific_fields: Any = None
    extra_content: Any = None
    """litellm and Gemini's OpenAI endpoint add these fields to calls. They have no effect."""


class ChatMessage(StrictModel):
    """One message.

    Clients send the server's answers back, with any number of calls. The fields that can only be null or empty appear
    in these answers or are added by OpenAI's clients, whose helpers also add `parsed`. litellm adds
    `provider_specific_fields` and `thinking_blocks`, OpenRouter `reasoning_details`, and clients written for Anthropic
    `cache_control`. None of these fields has an effect: templates read `reasoning_content`.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Content | None, PlainValidator(_optional_content, json_schema_input_type=str | list[TextPart] | None)
    ] = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = Field(None, max_length=MAX_ID_CHARACTERS)
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    annotations: Annotated[list[None], Field(fail_fast=True, max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None
    provider_specific_fields: Any = None
    thinking_blocks: Any = None
    reasoning_details: Any = None
    cache_control: Any = None

    @property
    def text(self) -> str:
        """The content as a string."""
        return self.content if isinstance(self.content, str) else "\n".join(self.content or ())


def template_messages(
    messages: Sequence[ChatMessage], forms: ContentForms, *, arguments_as_text: bool = False
) -> list[dict[str, Any]]:
    """Convert messages to dicts for a chat template, with contents in the form that it reads, and with the arguments of
    tool calls as objects or as text.

    System messages at the start become one, because many templates allow only one. IDs of calls become numbers unless
    they consist of nine letters and digits, because Mistral's templates refuse all others.

    Raises InvalidRequest for missing content, for fields that do not suit a message's role, and for tool messages that
    answer no earlier call.
    """
    calls: dict[str, tuple[str, str]] = {}
    shown = [
        _message(message, f"messages[{index}]", calls, forms, arguments_as_text)
        for index, message in enumerate(messages)
    ]
    num_leading = next((index for index, one in enumerate(shown) if one["role"] != "system"), len(shown))
    if num_leading > 1:
        content = joined_content(message.content or "" for message in messages[:num_leading])
        shown[:num_leading] = [{**shown[0], "content": formed_content(forms.of("system"), content)}]
    return shown


def joined_content(contents: Iterable[Content]) -> Content:
    """Return the content of messages that become one, with a blank line between them and without empty texts.

    Many templates put nothing between the parts of a message, so the blank line is within a part.
    """
    parts: list[list[str]] = []
    for content in contents:
        texts = [text for text in ((content,) if isinstance(content, str) else content) if text]
        if parts and texts:
            parts[-1] += ("\n\n", texts.pop(0))
        parts += [[text] for text in texts]
    joined = tuple(map("".join, parts))
    return joined if len(joined) > 1 else "".join(joined)


def reminder(text: str) -> str:
    """Return the text of a system message within a conversation as a part of the user's turn, because most chat
    templates accept a system message only at the start.

    Agents write instructions like this into messages of the user for models without such system messages.
    """
    return f"<system-reminder>\n{text}\n</system-reminder>"


def _message(
    message: ChatMessage, param: str, calls: dict[str, tuple[str, str]], forms: ContentForms, as_text: bool
) -> dict[str, Any]:
    """Convert one message. `calls` maps the ID of each earlier call to the template's ID and the function's name."""
    # "developer" is OpenAI's newer name for the system role. Chat templates use the older one.
    role = "system" if message.role == "developer" else message.role
    # An answer can have reasoning or calls alone, and a function can return nothing.
    if message.content is None and role not in ("assistant", "tool"):
        raise InvalidRequest(
            f"{param}.content is required", param=f"{param}.content", code="missing_required_parameter"
        )
    _check_role(message, param)
    shown: dict[str, Any] = {"role": role, "content": formed_content(forms.of(role), message.content or "")}
    if message.name is not None:
        shown["name"] = message.name
    if role == "tool":
        call_id = message.tool_call_id
        if call_id not in calls:
            raise InvalidRequest(
                "no earlier message has a tool call with this id",
                param=f"{param}.tool_call_id",
                code="missing_required_parameter" if call_id is None else "invalid_value",
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


def _check_role(message: ChatMessage, param: str) -> None:
    """Raise InvalidRequest if a field belongs to another role."""
    for role, fields in (("assistant", ("tool_calls", "reasoning_content", "reasoning")), ("tool", ("tool_call_id",))):
        found = next((name for name in fields if getattr(message, name) not in (None, [])), None)
        if found is not None and message.role != role:
            raise InvalidRequest(f"only {role} messages have {found}", param=f"{param}.{found}", code="invalid_value")


def _call(call: ToolCall, shown_id: str, as_text: bool) -> dict[str, Any]:
    shown = call.function.arguments if as_text else _arguments(call.function.arguments)
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
