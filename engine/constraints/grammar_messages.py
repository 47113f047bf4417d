"""The messages between the engine and the processes that follow grammars, and their framing."""

from __future__ import annotations

import struct
from typing import Annotated

import msgspec

EXIT_UNUSABLE = 3
"""Exit status of the process if the model's vocabulary cannot be used. The reason is on standard error."""

LENGTH = struct.Struct("!I")
"""A frame is the length of a message in bytes, followed by the message in MessagePack."""


MAX_ANSWER_BYTES = 1 << 20
"""Longest answer of a fork, in bytes: a mask for eight million tokens."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
TokenId = Annotated[int, msgspec.Meta(ge=0)]


class Follow(msgspec.Struct, frozen=True, tag=True):
    """Follow `tokens`, and answer with the next mask. The first message of a sequence contains its grammar."""

    number: int
    """Identifies the sequence."""
    tokens: tuple[int, ...] = ()
    grammar: str | None = None
    looks_ahead: bool = True
    """True if forced tokens after `tokens` may be followed, too."""


class Forget(msgspec.Struct, frozen=True, tag=True):
    """The sequence has ended."""

    number: int


class Followed(msgspec.Struct, frozen=True):
    """The answer to a Follow. If there is neither a mask nor a failure, only the end of the sequence can follow.

    `forced` tokens come first: each is the only one that can follow, and the process has followed it already.
    """

    number: int
    forced: tuple[TokenId, ...] = ()
    mask: bytes | None = None
    failure: str | None = None
    cpu_s: Seconds = 0.0
    """Processor time spent, in seconds."""
    compile_s: Seconds | None = None
    """Time to compile the grammar, in seconds. None if the grammar was compiled already."""


def frame(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message
