"""Turns the messages of a Messages request into chat messages.

Consecutive messages of a role form one turn. A turn of tool results becomes one chat message per result. A system
message within the conversation becomes a part of the user's turn, because most chat templates accept only one system
message, at the start.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from loramux.platform.bodies.conversation import CalledFunction, ChatMessage, ToolCall, reminder
from loramux.platform.errors import InvalidRequest
from loramux.platform.messages_api.blocks import (
    Block,
    RedactedThinkingBlock,
    SentMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from loramux.platform.messages_api.signatures import signed_thinking

MAX_NAMED_IDS = 8
"""Maximum number of tool uses that an error names."""

_ROLE_OF = {"tool_use": "assistant", "tool_result": "user", "thinking": "assistant", "redacted_thinking": "assistant"}
"""The role whose messages can have blocks of a type. All messages can have text."""


@dataclass(frozen=True, slots=True)
class PlacedBlock:
    """A block and its place in the body: the message's index, and its own in the message."""

    block: Block
    message: int
    number: int
    is_system: bool
    """Whether the block is part of a system message."""

    @property
    def param(self) -> str:
        return f"messages[{self.message}].content[{self.number}]"

    @property
    def text(self) -> str | None:
        """The text that a template shows, or None if the block is no text."""
        if not isinstance(self.block, TextBlock):
            return None
        return reminder(self.block.text) if self.is_system else self.block.text


def chat_messages(messages: Sequence[SentMessage], first: int = 0) -> Iterator[ChatMessage]:
    """Yield the chat messages for `messages`, from index `first`.

    Raises InvalidRequest for a block in a message of the wrong role, for a tool use without its result in the next turn
    and the other way round, and for thinking that this server did not sign.
    """
    used_ids: set[str] = set()
    waiting: list[str] = []
    param = "messages"
    for is_assistant, turn in groupby(_placed(messages, first), lambda placed: placed[0]):
        blocks = [placed for _, placed in turn]
        param = blocks[0].param
        if is_assistant:
            yield _assistant_message(blocks, used_ids)
            waiting = [one.block.id for one in blocks if isinstance(one.block, ToolUseBlock)]
        else:
            yield from _user_messages(blocks, waiting)
            waiting = []
    if waiting:
        raise _unanswered(waiting, param)


def _placed(messages: Sequence[SentMessage], first: int) -> Iterator[tuple[bool, PlacedBlock]]:
    """Yield each block, and whether it belongs to a turn of the assistant. A message without blocks counts as one with
    an empty text.
    """
    for index, message in enumerate(messages[first:], first):
        for number, block in enumerate(message.content or (TextBlock(type="text", text=""),)):
            placed = PlacedBlock(block, index, number, message.role == "system")
            owner = _ROLE_OF.get(block.type, message.role)
            if owner != message.role:
                raise InvalidRequest(f"only {owner} messages have {block.type} blocks", param=placed.param)
            yield message.role == "assistant", placed


def _assistant_message(blocks: Sequence[PlacedBlock], used_ids: set[str]) -> ChatMessage:
    calls, thinking = [], []
    for placed in blocks:
        match placed.block:
            case ToolUseBlock() as call:
                if call.id in used_ids:
                    raise InvalidRequest("tool_use ids must be unique", param=f"{placed.param}.id")
                used_ids.add(call.id)
                calls.append(_call(call))
            case ThinkingBlock() as block:
                text = signed_thinking(block.thinking, block.signature)
                if text is None:
                    raise InvalidRequest(
                        "invalid signature in thinking block: send the block as this server returned it, or leave it "
                        "out",
                        param=f"{placed.param}.signature",
                        code="invalid_signature",
                    )
                thinking.append(text)
            case RedactedThinkingBlock():
                raise InvalidRequest(
                    "invalid data in redacted_thinking block: this server returns no such blocks, so leave it out",
                    param=f"{placed.param}.data",
                    code="invalid_signature",
                )
    content = _content(blocks)
    return ChatMessage.model_construct(
        role="assistant",
        content=None if calls and not content else content,
        tool_calls=calls or None,
        reasoning_content="\n".join(thinking) if thinking else None,
    )


def _call(block: ToolUseBlock) -> ToolCall:
    # Models write calls with these separators, so a template that prints the text repeats their tokens.
    arguments = json.dumps(block.input, ensure_ascii=False)
    return ToolCall.model_construct(
        id=block.id, type="function", function=CalledFunction.model_construct(name=block.name, arguments=arguments)
    )


def _user_messages(blocks: Sequence[PlacedBlock], waiting: Sequence[str]) -> Iterator[ChatMessage]:
    """Yield a turn's results, then its text. `waiting` are the calls that the turn must answer."""
    missing = dict.fromkeys(waiting)
    texts: list[PlacedBlock] = []
    has_begun_text = False
    for placed in blocks:
        match placed.block:
            case ToolResultBlock() as result:
                if has_begun_text:
                    raise InvalidRequest("tool_result blocks must come before the text of a turn", param=placed.param)
                if result.tool_use_id not in missing:
                    raise InvalidRequest(
                        "each tool_result must answer a different tool_use of the assistant's last message",
                        param=f"{placed.param}.tool_use_id",
                    )
                del missing[result.tool_use_id]
                yield ChatMessage.model_construct(role="tool", content=_result(result), tool_call_id=result.tool_use_id)
            case _:
                texts.append(placed)
                has_begun_text = has_begun_text or not placed.is_system
    if missing:
        raise _unanswered(list(missing), blocks[0].param)
    if texts:
        yield ChatMessage.model_construct(role="user", content=_content(texts))


def _result(block: ToolResultBlock) -> str | tuple[str, ...]:
    """Return a result's content. Chat templates know no failed calls, so the text of one says that it failed."""
    texts = [one.text for one in block.content or ()]
    if block.is_error:
        texts = [f"Error: {texts[0]}" if texts else "Error", *texts[1:]]
    return texts[0] if len(texts) == 1 else tuple(texts) or ""


def _content(blocks: Sequence[PlacedBlock]) -> str | tuple[str, ...]:
    texts = [placed.text for placed in blocks if placed.text is not None]
    return texts[0] if len(texts) == 1 else tuple(texts) or ""


def _unanswered(ids: Sequence[str], param: str) -> InvalidRequest:
    named = ", ".join(ids[:MAX_NAMED_IDS])
    more = f" and {len(ids) - MAX_NAMED_IDS} more" if len(ids) > MAX_NAMED_IDS else ""
    return InvalidRequest(
        f"each tool_use needs a tool_result at the start of the next user message, which is missing for {named}{more}",
        param=param,
    )
