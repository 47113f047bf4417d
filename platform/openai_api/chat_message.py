"""Builds one choice's message in a chat completion: its content, its reasoning, and its tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.requests.answers import Document
from loramux.platform.requests.message_reader import MessageReader
from loramux.platform.tool_calls.call_parser import CallParser
from loramux.platform.tool_calls.events import ArgumentsEvent, CallBegun, ReasoningEvent, TextEvent


class MessageBuilder:
    """Turns a choice's deltas into OpenAI message deltas.

    `parser` finds tool calls in the text. `call_ids` supplies an ID for each call. With `hides_reasoning`, the
    reasoning is left out.
    """

    def __init__(self, parser: CallParser | None, call_ids: Iterator[str], *, hides_reasoning: bool = False) -> None:
        self._reader = MessageReader(parser)
        self._call_ids = call_ids
        self._hides_reasoning = hides_reasoning

    @property
    def ends_with_calls(self) -> bool:
        """See `MessageReader.ends_with_calls`."""
        return self._reader.ends_with_calls

    def feed(self, delta: ChoiceDelta) -> Iterator[Document]:
        """Yield the message deltas that `delta` adds. Consume them all before the next call."""
        for part in self._reader.feed(delta):
            match part:
                case ReasoningEvent(text, separator):
                    if not self._hides_reasoning:
                        # vLLM's newer and older names for the field.
                        yield {"reasoning": separator + text, "reasoning_content": separator + text}
                case TextEvent(text, separator):
                    yield {"content": separator + text}
                case CallBegun(index, name):
                    function = {"name": name, "arguments": ""}
                    call = {"index": index, "id": next(self._call_ids), "type": "function", "function": function}
                    yield {"tool_calls": [call]}
                case ArgumentsEvent(index, text):
                    yield {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def whole_message(deltas: Iterable[Document], echo: str = "") -> Document:
    """Merge message deltas into the message of a non-streamed response. Its content begins with `echo`."""
    content, reasoning = echo, ""
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
