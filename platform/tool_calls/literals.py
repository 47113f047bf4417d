"""Converts literals to JSON while reading them. Lists and objects in literals must have JSON's brackets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from loramux.platform.tool_calls.reader import Malformed, Reader, Steps

MAX_DEPTH = 64
"""Maximum depth of lists and objects in a literal."""

OnPiece = Callable[[str], None]


class Literals(Protocol):
    def key(self, reader: Reader) -> Steps[str]:
        """Read a key and the colon after it. Return the key as a JSON string. Raises Malformed."""

    def scalar(self, reader: Reader, on_piece: OnPiece) -> Steps[None]:
        """Read a string, a number, a boolean or null. Raises Malformed."""


def read_literal(reader: Reader, literals: Literals, on_piece: OnPiece) -> Steps[None]:
    """Read one literal and pass it on as JSON, piece by piece. Raises Malformed.

    Open brackets are kept in a list, so nesting cannot exhaust the stack.
    """
    closers: list[str] = []
    while True:
        yield from reader.spaces()
        first = yield from reader.peek()
        is_empty = bool(first) and first in "[{"
        if is_empty:
            if len(closers) == MAX_DEPTH:
                raise Malformed
            yield from reader.expect(first)
            on_piece(first)
            closers.append("]" if first == "[" else "}")
        else:
            yield from literals.scalar(reader, on_piece)
        if not (yield from _next_member(reader, literals, on_piece, closers, is_empty=is_empty)):
            return


def _next_member(
    reader: Reader, literals: Literals, on_piece: OnPiece, closers: list[str], *, is_empty: bool
) -> Steps[bool]:
    """Read up to the value of the next list item or object member. Return False if the literal is complete."""
    while closers:
        yield from reader.spaces()
        is_closed = yield from reader.literal(closers[-1])
        if not is_closed and not is_empty:
            yield from reader.expect(",")
            yield from reader.spaces()
            is_closed = yield from reader.literal(closers[-1])
            if not is_closed:
                on_piece(", ")
        if is_closed:
            on_piece(closers.pop())
            is_empty = False
            continue
        if closers[-1] == "}":
            key = yield from literals.key(reader)
            on_piece(f"{key}: ")
        return True
    return False
