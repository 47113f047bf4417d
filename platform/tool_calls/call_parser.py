"""Base class of the parsers that find tool calls in text."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from loramux.platform.tool_calls.call_syntax import CallSyntax
from loramux.platform.tool_calls.events import ArgumentsEvent, CallBegun, Event, TextEvent
from loramux.platform.tool_calls.reader import MAX_GAP, SPACE, WHITESPACE, Malformed, Reader, Steps

_GAP = re.compile(rf"{SPACE}{{1,{MAX_GAP}}}\Z")


class CallParser(ABC):
    """Finds the calls in an answer that arrives in pieces of any length.

    A block of calls begins at one of the format's `markers`, or at the start of the answer with one of its `openers`.
    Whitespace around a block is dropped. A call begins once its name and the start of its arguments have been read.
    Malformed output is returned as text, but arguments are not validated, so they may be malformed or cut off. Parsing
    never raises, and takes time linear in the length of the answer.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[tuple[str, ...]] = ()
    """Markers that end a block. Only markers that can be special tokens of a model are listed."""
    openers: ClassVar[str] = ""
    syntax: ClassVar[CallSyntax | None] = None
    """How grammars write calls. Set by the parsers of extensions; `SYNTAXES` has the syntax of the built-in parsers."""

    def __init__(self) -> None:
        self.schemas: Mapping[str, Mapping[str, Any]] = {}
        """The schemas of the arguments of the request's functions, for formats that do not show the types of values."""
        self._reader = Reader()
        self._events: list[Event] = []
        self._num_calls = 0
        self._num_complete = 0
        self.is_cut_off = False
        """True if the answer ended inside a call that had begun."""
        self._marker = re.compile("|".join(map(re.escape, self.markers))) if self.markers else None
        self._beginnings = {marker[:length] for marker in self.markers for length in range(1, len(marker))}
        self._max_held = max(map(len, self._beginnings), default=0)
        self._steps = self._parse()

    def feed(self, text: str) -> list[Event]:
        """Add a piece of the answer, and return the events that are now certain."""
        self._reader.add(text)
        next(self._steps)
        return self._found()

    def finish(self) -> list[Event]:
        """Return the remaining events at the end of the answer."""
        self._reader.is_ended = True
        for _ in self._steps:
            pass
        return self._found()

    @abstractmethod
    def _block(self, marker: str) -> Steps[None]:
        """Read the calls after a marker, or from an opener if there is no marker. Raises Malformed."""

    def _parse(self) -> Steps[None]:
        if self.openers:
            yield from self._block_at_start()
        while True:
            marker = yield from self._text()
            if marker is None:
                return
            yield from self._tried(marker)

    def _block_at_start(self) -> Steps[None]:
        reader = self._reader
        while not reader.text.strip(WHITESPACE) and len(reader.text) <= MAX_GAP:
            if not (yield from reader.more()):
                return
        num_spaces = len(reader.text) - len(reader.text.lstrip(WHITESPACE))
        if num_spaces <= MAX_GAP and reader.text[num_spaces : num_spaces + 1] in tuple(self.openers):
            reader.take(num_spaces)
            yield from self._tried("")

    def _tried(self, marker: str) -> Steps[None]:
        reader = self._reader
        self._complete()
        try:
            yield from self._block(marker)
            yield from reader.spaces()
        except Malformed:
            # If the answer has ended, the parser was still waiting for more of this block.
            self.is_cut_off = reader.is_ended and self._num_calls > self._num_complete
            self._say(reader.taken())
        reader.mark()

    def _text(self) -> Steps[str | None]:
        """Read text up to and including the next marker, or to the end of the answer."""
        reader = self._reader
        while True:
            found = self._marker.search(reader.text, reader.at) if self._marker else None
            end = found.start() if found else len(reader.text) - self._num_held(reader.text[reader.at :])
            if found or not reader.is_ended:
                gap = _GAP.search(reader.text, max(reader.at, end - MAX_GAP), end)
                certain = gap.start() if gap else end
            else:
                certain = len(reader.text)
            self._say(reader.take(certain))
            reader.mark()
            if found:
                reader.take(found.end())
                return found.group()
            if not (yield from reader.more()):
                self._say(reader.take(len(reader.text)))
                return None

    def _num_held(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that can begin a marker."""
        longest = min(self._max_held, len(text))
        return next((n for n in range(longest, 0, -1) if text[-n:] in self._beginnings), 0)

    def _begin(self, name: str) -> None:
        self._events.append(CallBegun(self._num_calls, name))
        self._num_calls += 1
        self._reader.mark()

    def _argue(self, text: str) -> None:
        self._events.append(ArgumentsEvent(self._num_calls - 1, text))
        self._reader.mark()

    def _complete(self) -> None:
        """Note that all calls so far are complete. What is malformed after this is text of its own."""
        self._num_complete = self._num_calls

    def _say(self, text: str) -> None:
        if text:
            self._events.append(TextEvent(text))

    def _found(self) -> list[Event]:
        found, self._events = self._events, []
        return found
