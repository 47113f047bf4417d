"""Builds the response bodies that return generated output to OpenAI clients, whole or in chunks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.generation.pending_deltas import JoinedDeltas

LOWEST_LOGPROB = -9999.0
"""The log-probability that OpenAI reports for an impossible token, because JSON has no infinity."""

Document = dict[str, Any]
Chunk = Document | msgspec.Raw
"""A chunk of a stream, possibly already encoded."""


class Answer(Protocol):
    """Builds one endpoint's response bodies. Use one object per request, because each chunk depends on earlier ones."""

    def chunks(self, delta: ChoiceDelta, so_far: UsageSoFar | None = None) -> list[Chunk]:
        """Return the chunks that a stream sends for a delta. With `so_far`, each reports the tokens that it and the
        chunks before it carried.
        """

    def usage_chunk(self, usage: Usage) -> Document:
        """Return the last chunk of a stream, which is sent if the client asked for usage."""

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document: ...


def merged(deltas: Sequence[ChoiceDelta]) -> list[ChoiceDelta]:
    """Return one delta per choice, in the order of the choices."""
    groups: dict[int, JoinedDeltas] = {}
    for delta in deltas:
        groups.setdefault(delta.index, JoinedDeltas()).add(delta)
    return [group.delta() for _, group in sorted(groups.items())]


class ChunkTemplates:
    """Encodes chunks that differ only in their text, which is faster than encoding whole documents."""

    def __init__(self, make: Callable[[int, str], Document]) -> None:
        """`make(index, text)` returns the chunk with this text for the choice."""
        self._make = make
        self._parts: dict[int, tuple[bytes, bytes]] = {}

    def chunk(self, index: int, text: str) -> msgspec.Raw:
        parts = self._parts.get(index)
        if parts is None:
            mark = secrets.token_hex(16)
            before, after = msgspec.json.encode(self._make(index, mark)).split(msgspec.json.encode(mark))
            parts = self._parts[index] = (before, after)
        return msgspec.Raw(parts[0] + msgspec.json.encode(text) + parts[1])


class UsageSoFar:
    """The usage so far, for clients that ask for it in each chunk of a stream."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0

    def add(self, delta: ChoiceDelta) -> None:
        self._completion_tokens += len(delta.token_ids)

    def body(self) -> Document:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
        }


def usage_body(usage: Usage) -> Document:
    body: Document = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens is not None:
        body["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return body


def name_by_id(token_id: int) -> str:
    """Return the name of a token for `return_tokens_as_token_ids`, as in vLLM."""
    return f"token_id:{token_id}"


def shown_logprob(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
