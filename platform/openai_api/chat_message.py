"""Builds one choice's message in a chat completion: its content, its reasoning, and its tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.requests.answers import Document
from loramux.platform.tool_calls.call_parser import CallParser
from loramux.platform.tool_calls.events import ArgumentsEvent, CallBegun, CallEnded, Event, TextEvent


class MessageBuilder:
    """Turns a choice's deltas into OpenAI message deltas.

    `parser` finds tool calls in the text. Without a parser, all text is content. The `calls` in a delta are tool calls
    delimited by special tokens. `call_ids` supplies an ID for each call. With `hides_reasoning`, the reasoning is left
    out.
    """

    def __init__(self, parser: CallParser | None, call_ids: Iterator[str], *, hides_reasoning: bool = False) -> None:
        self._parser = parser
        self._call_ids = call_ids
        self._hides_reasoning = hides_reasoning
        self.has_calls = False
        self._is_in_call = False
        """True while a tool call delimited by special tokens is open."""

    @property
    def ends_with_calls(self) -> bool:
        """True if the message has calls and none of them was cut off, for example by a stop string."""
        is_cut_off = self._is_in_call or (self._parser is not None and self._parser.is_cut_off)
        return self.has_calls and not is_cut_off

    def feed(self, delta: ChoiceDelta) -> Iterator[Document]:
        """Yield the message deltas that `delta` adds. Consume them all before the next call."""
        if delta.reasoning and not self._hides_reasoning:
            # vLLM's newer and older names for the field.
            yield {"reasoning": delta.reasoning, "reasoning_content": delta.reasoning}
        for event in [*self._events(delta), *delta.calls]:
            match event:
                case TextEvent(text):
                    yield {"content": text}
                case CallBegun(index, name):
                    self.has_calls = True
                    self._is_in_call = self._parser is None
                    function = {"name": name, "arguments": ""}
                    call = {"index": index, "id": next(self._call_ids), "type": "function", "function": function}
                    yield {"tool_calls": [call]}
                case ArgumentsEvent(index, text):
                    yield {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
                case CallEnded():
                    self._is_in_call = False

    def _events(self, delta: ChoiceDelta) -> Iterable[Event]:
        if self._parser is None:
            return [TextEvent(delta.text)] if delta.text else []
        events = self._parser.feed(delta.text)
        return events if delta.finish_reason is None else [*events, *self._parser.finish()]


def whole_message(deltas: Iterable[Document]) -> Document:
    """Merge message deltas into the message of a non-streamed response."""
    content, reasoning = "", ""
    calls: list[Document] = []
    for delta in deltas:
        content += delta.get("content", "")
        reasoning += delta.get("reasoning", "")
        for piece in delta.get("tool_calls", ()):
            if piece["index"] == len(calls):
                calls.append({"id": piece["id"], "type": "function", "function": dict(piece["function"])})
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    message: Document = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        message["tool_calls"] = calls
    return message
