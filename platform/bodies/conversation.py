"""The messages of a chat request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from pydantic import Field, PlainValidator
from pydantic_core import PydanticKnownError
from typing_extensions import TypedDict

from loramux.engine.chat_templates.content_form import Content
from loramux.engine.chat_templates.messages import Message, Role
from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.bodies.text_fields import CalledName, encodable

MAX_ID_CHARACTERS = 256

PART_FIELDS = frozenset(
    {
        "annotations",
        "logprobs",
        # Hints where other servers cache the prompt.
        "cache_control",
        "prompt_cache_breakpoint",
        # OpenAI's Agents SDK for JavaScript copies the other fields of an answer's message into its text. It also sends
        # the calls in their own place.
        "role",
        "tool_calls",
        "reasoning",
        "reasoning_content",
        "reasoning_details",
        "provider_specific_fields",
    }
)
"""Fields of a text part without effect."""

NULL_PART_FIELDS = frozenset({"refusal", "audio", "function_call"})
"""Fields of a text part that can only be null, as those of a message."""

_ROLES = (None, *get_args(Role))

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""The types of supported content parts, each with the field that holds its text."""


class TextPart(TypedDict):
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(TypedDict):
    type: Literal["refusal"]
    refusal: str


ContentParts: TypeAlias = list[TextPart | RefusalPart]


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
        others = part.keys() - {"type", _TEXTS[kind], *PART_FIELDS}
        if unknown := {name for name in others if name not in NULL_PART_FIELDS or part[name] is not None}:
            raise ValueError(f"a part of the type {kind} has no field {min(unknown)[:64]!r}")
        if part.get("role") not in _ROLES:
            raise ValueError("the role of a part must be that of a message")
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

    role: Role
    content: Annotated[
        Content | None, PlainValidator(_optional_content, json_schema_input_type=str | ContentParts | None)
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


def rendered_fields(messages: Sequence[ChatMessage]) -> list[Message]:
    """Return messages with the fields that reach a chat template."""
    return msgspec.convert(messages, list[Message], from_attributes=True)


def reminder(text: str) -> str:
    """Return the text of a system message within a conversation as a part of the user's turn, because most chat
    templates accept a system message only at the start.

    Agents write instructions like this into messages of the user for models without such system messages.
    """
    return f"<system-reminder>\n{text}\n</system-reminder>"
