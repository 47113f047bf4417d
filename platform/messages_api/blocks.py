"""The content blocks of a Messages request (https://platform.claude.com/docs/en/api/messages)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from loramux.platform.bodies.conversation import MAX_ID_CHARACTERS
from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.bodies.text_fields import CalledName
from loramux.platform.bodies.unsupported_fields import Neutral

MAX_SHOWN_TYPE = 64
"""Longest type of a block that an error repeats, in characters."""

BlockId = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARACTERS)]


class TextBlock(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: Any = None
    """Says where to cache the prompt. It has no effect, because every prefix is cached."""
    citations: Any = None
    """Part of the answers that clients send back. It has no effect."""


class ToolUseBlock(StrictModel):
    NEUTRAL: ClassVar[Neutral] = {"toolset_name": (), "caller": ({"type": "direct"},)}

    type: Literal["tool_use"]
    id: BlockId
    name: CalledName
    input: dict[str, Any]
    cache_control: Any = None


def supported(*types: str) -> BeforeValidator:
    """Refuse blocks of other types by name."""

    def check(block: Any) -> Any:
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in types:
            raise ValueError(f"{kind[:MAX_SHOWN_TYPE]} blocks are not supported here, only {', '.join(types)}")
        return block

    return BeforeValidator(check, json_schema_input_type=Any)


def _as_blocks(content: Any) -> Any:
    """A string is short for one text block."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


TextBlocks = Annotated[
    list[Annotated[TextBlock, supported("text")]],
    Field(fail_fast=True),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
]
"""A string or a list of text blocks."""


class ToolResultBlock(StrictModel):
    NEUTRAL: ClassVar[Neutral] = {"toolset_name": ()}

    type: Literal["tool_result"]
    tool_use_id: BlockId
    content: TextBlocks | None = None
    is_error: bool | None = None
    cache_control: Any = None


class ThinkingBlock(StrictModel):
    type: Literal["thinking"]
    thinking: str
    signature: str


class RedactedThinkingBlock(StrictModel):
    type: Literal["redacted_thinking"]
    data: str


Block: TypeAlias = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock

_Blocks = list[
    Annotated[
        Annotated[Block, Field(discriminator="type")],
        supported("text", "tool_use", "tool_result", "thinking", "redacted_thinking"),
    ]
]


class SentMessage(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        _Blocks, Field(fail_fast=True), BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block])
    ]
