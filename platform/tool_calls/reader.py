"""Reads text that arrives in pieces, with generators that wait for more."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

from loramux.engine.text.detokenizer import overlap

_T = TypeVar("_T")
Steps = Generator[None, None, _T]

WHITESPACE = " \t\n\r"
"""The characters that may surround calls and thinking: JSON whitespace."""

SPACE = r"[ \t\n\r]"
"""The same characters as a regular expression."""

MAX_GAP = 64
"""Maximum number of whitespace characters that are dropped before a block of calls, or before thinking."""

MAX_NAME_LENGTH = 256
"""Longest name of a function, in characters."""

JSON_SYNTAX = re.compile(r'["\[\]{}]')
"""The characters that open and close a JSON value and its strings."""

JSON_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)

PYTHON_SYNTAX = re.compile(r"""["'\[\](){}]""")

_IN_STRING = {quote: re.compile(rf"[\\{quote}]") for quote in "\"'"}
_SPACE = re.compile(rf"{SPACE}*")
_SCALAR = re.compile(r"[\w.+-]*")


def is_function_name(text: str) -> bool:
    """True for a name that a call can have, whether or not a function of this name was offered."""
    return 0 < len(text) <= MAX_NAME_LENGTH and text.isprintable()


class Malformed(Exception):
    """The text is not in the parser's format."""


class Reader:
    """Reads forward only. `taken` is the text read since the last `mark`."""

    def __init__(self) -> None:
        self.text = ""
        """The received text. The part that has not been read starts at index `at`."""
        self.at = 0
        self.is_ended = False
        self._taken: list[str] = []

    @property
    def is_exhausted(self) -> bool:
        """True if the whole answer has been read."""
        return self.is_ended and self.at >= len(self.text)

    def ends_within(self, *texts: str) -> bool:
        """True if the whole answer has been read but for the beginning of one of these texts."""
        rest = self.text[self.at :]
        return self.is_ended and any(text.startswith(rest) for text in texts)

    def add(self, text: str) -> None:
        self.text = self.text[self.at :] + text
        self.at = 0

    def mark(self) -> None:
        """Forget the text read so far."""
        self._taken = []

    def taken(self) -> str:
        return "".join(self._taken)

    def take(self, end: int) -> str:
        """Read up to the position `end` of `text`."""
        piece = self.text[self.at : end]
        self._taken.append(piece)
        self.at = end
        return piece

    def more(self) -> Steps[bool]:
        """Wait for more text. Return False if the answer is over."""
        if self.is_ended:
            return False
        yield
        return True

    def peek(self) -> Steps[str]:
        """Return the next character, or "" at the end of the answer."""
        while self.at >= len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def literal(self, expected: str) -> Steps[bool]:
        """Read `expected` if it comes next. Return whether it did."""
        while True:
            found = self.text[self.at : self.at + len(expected)]
            if found == expected:
                self.take(self.at + len(expected))
                return True
            if not expected.startswith(found) or not (yield from self.more()):
                return False

    def expect(self, expected: str) -> Steps[None]:
        """Read `expected`. Raises Malformed if anything else comes next."""
        if not (yield from self.literal(expected)):
            raise Malformed

    def span(self, pattern: re.Pattern[str], max_length: int | None = None) -> Steps[str]:
        pieces: list[str] = []
        length = 0
        while True:
            match = pattern.match(self.text, self.at)
            assert match is not None
            pieces.append(self.take(match.end()))
            length += len(pieces[-1])
            if max_length is not None and length > max_length:
                raise Malformed
            if self.at < len(self.text) or not (yield from self.more()):
                return "".join(pieces)

    def spaces(self) -> Steps[str]:
        return (yield from self.span(_SPACE))

    def enclosed(self, syntax: re.Pattern[str], on_piece: Callable[[str], None]) -> Steps[None]:
        """Read a value from its opening bracket or quote to the closing one, piece by piece.

        All kinds of brackets are counted together, so nesting takes constant memory. Raises Malformed if the value is
        cut off.
        """
        depth, quote, is_escaped = 0, "", False
        while True:
            text, at, is_closed = self.text, self.at, False
            while at < len(text) and not is_closed:
                if is_escaped:
                    at, is_escaped = at + 1, False
                    continue
                match = (_IN_STRING[quote] if quote else syntax).search(text, at)
                if match is None:
                    at = len(text)
                    continue
                at, found = match.end(), match.group()
                if found == "\\":
                    is_escaped = True
                elif quote:
                    quote, is_closed = "", depth == 0
                elif found in "\"'":
                    quote = found
                else:
                    depth += 1 if found in "([{" else -1
                    is_closed = depth <= 0
            if at > self.at:
                on_piece(self.take(at))
            if is_closed:
                return
            if not (yield from self.more()):
                raise Malformed

    def until(self, end: str, on_piece: Callable[[str], None]) -> Steps[None]:
        """Read up to and including `end`, and pass on the text before it, piece by piece.

        Raises Malformed if the answer ends before `end`.
        """
        yield from self.before(re.compile(re.escape(end)), (end,), on_piece)
        self.take(self.at + len(end))

    def before(self, stop: re.Pattern[str], stops: Collection[str], on_piece: Callable[[str], None]) -> Steps[None]:
        """Read up to the first of the texts `stops`, which the pattern `stop` matches, and pass on the text before it,
        piece by piece.

        Raises Malformed if the answer ends before.
        """
        while True:
            found = stop.search(self.text, self.at)
            certain = found.start() if found else len(self.text) - self._num_held(stops)
            if certain > self.at:
                on_piece(self.take(certain))
            if found:
                return
            if not (yield from self.more()):
                self.take(len(self.text))
                raise Malformed

    def _num_held(self, stops: Collection[str]) -> int:
        rest = self.text[self.at :]
        return max(overlap(rest, one) for one in stops)

    def json_string(self) -> Steps[str]:
        """Read a JSON string and decode it. Raises Malformed."""
        if (yield from self.peek()) != '"':
            raise Malformed
        pieces: list[str] = []
        yield from self.enclosed(JSON_SYNTAX, pieces.append)
        try:
            decoded = json.loads("".join(pieces), strict=False)
            decoded.encode()
        except ValueError as error:  # malformed, or a lone surrogate
            raise Malformed from error
        return str(decoded)

    def json_value(self) -> Steps[None]:
        """Read any JSON value. Raises Malformed."""
        first = yield from self.peek()
        if first and first in '"[{':
            yield from self.enclosed(JSON_SYNTAX, lambda _: None)
        elif not (yield from self.span(_SCALAR)):
            raise Malformed
