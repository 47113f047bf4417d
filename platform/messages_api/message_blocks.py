"""Turns the deltas of an answer into Anthropic's stream of content blocks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.messages_api.signatures import sign
from loramux.platform.requests.answers import Document
from loramux.platform.requests.message_reader import MessageReader
from loramux.platform.tool_calls.call_parser import CallParser
from loramux.platform.tool_calls.events import ArgumentsEvent, CallBegun, ReasoningEvent, TextEvent


@dataclass(slots=True)
class _OpenBlock:
    index: int
    type: str
    thinking: str = ""
    """The text of a thinking block, which its signature covers."""


class BlockEvents:
    """Yields the events of an answer's content blocks, in order. A block ends when the next begins.

    `parser` finds tool calls in the text; without one, all text is text. `note_call` is called for each call. With
    `hides_thinking`, the answer has no thinking blocks. With `omits_thinking`, they have a signature but no text.
    """

    def __init__(
        self,
        parser: CallParser | None,
        note_call: Callable[[], None] = lambda: None,
        *,
        hides_thinking: bool = False,
        omits_thinking: bool = False,
    ) -> None:
        self._reader = MessageReader(parser)
        self._note_call = note_call
        self._hides_thinking = hides_thinking
        self._omits_thinking = omits_thinking
        self._open: _OpenBlock | None = None
        self._num_blocks = 0

    @property
    def ends_with_calls(self) -> bool:
        """True if the answer has calls and none of them was cut off."""
        return self._reader.ends_with_calls

    def feed(self, delta: ChoiceDelta) -> Iterator[Document]:
        """Yield the events that `delta` adds. Consume them all before the next call."""
        for part in self._reader.feed(delta):
            match part:
                case ReasoningEvent(text, separator):
                    if not self._hides_thinking:
                        yield from self._thinking(text, separator)
                case TextEvent(text, separator):
                    if self._open is None or self._open.type != "text":
                        yield from self._begin({"type": "text", "text": ""})
                        separator = ""
                    yield self._delta("text_delta", "text", separator + text)
                case CallBegun(_, name):
                    self._note_call()
                    call_id = f"toolu_{secrets.token_hex(12)}"
                    yield from self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
                    yield self._delta("input_json_delta", "partial_json", "")
                case ArgumentsEvent(_, text):
                    yield self._delta("input_json_delta", "partial_json", text)
        if delta.finish_reason is not None:
            yield from self._end()

    def _thinking(self, text: str, separator: str) -> Iterator[Document]:
        if self._open is None or self._open.type != "thinking":
            yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
        else:
            text = separator + text
        assert self._open is not None
        self._open.thinking += text
        if not self._omits_thinking:
            yield self._delta("thinking_delta", "thinking", text)

    def _begin(self, block: Document) -> Iterator[Document]:
        yield from self._end()
        self._open = _OpenBlock(self._num_blocks, block["type"])
        self._num_blocks += 1
        yield {"type": "content_block_start", "index": self._open.index, "content_block": block}

    def _end(self) -> Iterator[Document]:
        if self._open is None:
            return
        if self._open.type == "thinking":
            signature = sign(self._open.thinking, is_omitted=self._omits_thinking)
            yield self._delta("signature_delta", "signature", signature)
        yield {"type": "content_block_stop", "index": self._open.index}
        self._open = None

    def _delta(self, kind: str, name: str, text: str) -> Document:
        assert self._open is not None
        return {"type": "content_block_delta", "index": self._open.index, "delta": {"type": kind, name: text}}
