"""The events that a parser finds in an answer, in order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextEvent:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The start of a call, whose name is now known. `index` counts the answer's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsEvent:
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call is complete. Only calls delimited by special tokens have this event."""

    index: int


CallEvent = CallBegun | ArgumentsEvent | CallEnded

Event = TextEvent | CallBegun | ArgumentsEvent
