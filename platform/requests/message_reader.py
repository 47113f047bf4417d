"""Reads one choice of a chat answer: its text, its reasoning, and its tool calls."""

from __future__ import annotations

from collections.abc import Iterator

from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.tool_calls.call_parser import CallParser
from loramux.platform.tool_calls.events import CallBegun, CallEnded, Part, ReasoningEvent, TextEvent


class MessageReader:
    """Turns a choice's deltas into parts, in the order in which the model wrote them.

    `parser` finds tool calls in the text. Without a parser, all text is content.
    """

    def __init__(self, parser: CallParser | None) -> None:
        self._parser = parser
        self.has_calls = False
        self._is_in_call = False
        """True while a tool call delimited by special tokens is open."""

    @property
    def ends_with_calls(self) -> bool:
        """True if the message has calls and none of them was cut off, for example by a stop string."""
        is_cut_off = self._is_in_call or (self._parser is not None and self._parser.is_cut_off)
        return self.has_calls and not is_cut_off

    def feed(self, delta: ChoiceDelta) -> Iterator[Part]:
        """Yield the parts that `delta` adds. Consume them all before the next call."""
        for part in self._parts(delta):
            match part:
                case CallBegun():
                    self.has_calls = True
                    self._is_in_call = self._parser is None
                case CallEnded():
                    self._is_in_call = False
            yield part

    def _parts(self, delta: ChoiceDelta) -> Iterator[Part]:
        for part in delta.parts or _reasoning_and_text(delta):
            if self._parser is not None and isinstance(part, TextEvent):
                yield from self._parser.feed(part.separator + part.text)
            else:
                yield part
        if self._parser is not None and delta.finish_reason is not None:
            yield from self._parser.finish()


def _reasoning_and_text(delta: ChoiceDelta) -> Iterator[Part]:
    if delta.reasoning:
        yield ReasoningEvent(delta.reasoning)
    if delta.text:
        yield TextEvent(delta.text)
