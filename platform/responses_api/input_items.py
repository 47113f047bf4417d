"""The input items of a response request, and the parts of their content."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Discriminator, Field, PlainValidator, Tag

from loramux.engine.chat_templates.content_form import Content
from loramux.platform.bodies.conversation import MAX_ID_CHARACTERS, ContentParts, text_content
from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.bodies.text_fields import CalledName
from loramux.platform.bodies.unsupported_fields import RESPONSES_ITEM, Neutral
from loramux.platform.errors import InvalidRequest

MAX_ITEMS = 4096

ITEM_TYPES = frozenset(
    {
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "item_reference",
    }
)

Status: TypeAlias = Literal["in_progress", "completed", "incomplete"]
ItemId: TypeAlias = Annotated[str, Field(max_length=MAX_ID_CHARACTERS)]
CallId: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARACTERS)]
ContentField = Annotated[Content, PlainValidator(text_content, json_schema_input_type=str | ContentParts)]


class Item(StrictModel):
    """`id` and `status` are part of items that a server returned. They have no effect."""

    NEUTRAL: ClassVar[Neutral] = RESPONSES_ITEM

    id: ItemId | None = None
    status: Status | None = None


class MessageItem(Item):
    """`phase` says which part of a turn a message is. It has no effect."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: ContentField
    phase: Literal["commentary", "final_answer"] | None = None


class ReasoningText(StrictModel):
    type: Literal["reasoning_text", "text"]
    text: str


class SummaryText(StrictModel):
    type: Literal["summary_text"]
    text: str


class ReasoningItem(Item):
    """The reasoning before a message or a call. Templates read the text, and a summary has no effect.

    A client can leave out `content` and send only the `encrypted_content` of a reasoning item that this server made.
    That of another server has no effect, because only that server can read it.
    """

    type: Literal["reasoning"]
    summary: Annotated[list[SummaryText], Field(fail_fast=True, max_length=MAX_ITEMS)] | None = None
    content: Annotated[list[ReasoningText], Field(fail_fast=True, max_length=MAX_ITEMS)] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(Item):
    type: Literal["function_call"]
    call_id: CallId
    name: CalledName
    namespace: CalledName | None = None
    arguments: str


class FunctionOutputItem(Item):
    type: Literal["function_call_output"]
    call_id: CallId
    output: ContentField
    name: str | None = None
    namespace: str | None = None


class CustomCallItem(Item):
    type: Literal["custom_tool_call"]
    call_id: CallId
    name: CalledName
    namespace: CalledName | None = None
    input: str


class CustomOutputItem(Item):
    type: Literal["custom_tool_call_output"]
    call_id: CallId
    output: ContentField
    name: str | None = None
    namespace: str | None = None


class ItemReference(StrictModel):
    """A reference to an item of a stored response."""

    type: Literal["item_reference"] | None = None
    id: ItemId


def _type_of(item: Any) -> str:
    """Return an item's type. A message does not need one, and neither does a reference."""
    kind = item.get("type") if isinstance(item, dict) else None
    if isinstance(kind, str):
        return kind
    return "item_reference" if isinstance(item, dict) and item.keys() <= {"id", "type"} else "message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[CustomOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_type_of),
]


def _form_of(value: Any) -> str:
    return "items" if isinstance(value, list) else "text"


Input = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[InputItem], Field(fail_fast=True, max_length=MAX_ITEMS), Tag("items")],
    Discriminator(_form_of),
]


def refuse_other_items(items: Any, name: str = "input") -> None:
    """Raise InvalidRequest for the first item of a type that this server does not support, and name the type. `name` is
    the name of the field.
    """
    for index, item in enumerate(items if isinstance(items, list) else ()):
        kind = _type_of(item)
        if kind not in ITEM_TYPES:
            raise InvalidRequest(
                f"items of the type {kind[:64]!r} are not supported",
                param=f"{name}[{index}].type",
                code="unsupported_item",
            )
