"""Reads one choice of a chat answer: its text, its reasoning, and its tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.tool_calls.call_parser import CallParser
from loramux.platform.tool_calls.events import CallBegun, CallEnded, CallEvent, Event, TextEvent


@dataclass(frozen=True, slots=True)
class ReasoningEvent:
    text: str


Part: TypeAlias = ReasoningEvent | TextEvent | CallEvent
"""A part of a message, in the order in which the model wrote them."""


class MessageReader:
    """Turns a choice's deltas into parts.

    `parser` finds tool calls in the text. Without a parser, all text is content. The `calls` in a delta are tool calls
    delimited by special tokens.
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
        if delta.reasoning:
            yield ReasoningEvent(delta.reasoning)
        for event in (*self._events(delta), *delta.calls):
            match event:
                case CallBegun():
                    self.has_calls = True
                    self._is_in_call = self._parser is None
                case CallEnded():
                    self._is_in_call = False
            yield event

    def _events(self, delta: ChoiceDelta) -> Iterable[Event]:
        if self._parser is None:
            return [TextEvent(delta.text)] if delta.text else []
        events = self._parser.feed(delta.text)
        return events if delta.finish_reason is None else [*events, *self._parser.finish()]
