"""The parts of an answer, in the order in which the model wrote them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class TextEvent:
    text: str
    separator: str = ""
    """Text that separates the start of a message from an earlier message, if both are shown as one text."""


@dataclass(frozen=True, slots=True)
class ReasoningEvent:
    text: str
    separator: str = ""
    """As in TextEvent."""


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
"""What a parser of tool calls finds."""

Part: TypeAlias = ReasoningEvent | TextEvent | CallEvent


def joined_parts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Join the pieces of each message."""
    groups: list[list[Part]] = []
    for part in parts:
        if groups and _continues(part, groups[-1][0]):
            groups[-1].append(part)
        else:
            groups.append([part])
    return tuple(_joined(group) for group in groups)


def _continues(part: Part, first: Part) -> bool:
    match part:
        case TextEvent(_, separator) | ReasoningEvent(_, separator):
            return type(part) is type(first) and not separator
        case ArgumentsEvent():
            return isinstance(first, ArgumentsEvent)
        case _:
            return False


def _joined(group: list[Part]) -> Part:
    first = group[0]
    if isinstance(first, CallBegun | CallEnded):
        return first
    return replace(first, text="".join(part.text for part in group if not isinstance(part, CallBegun | CallEnded)))
