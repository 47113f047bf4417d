"""The bodies that return generated output to a client, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from loramux.platform.errors import ApiError
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.generation.pending_deltas import JoinedDeltas

LOWEST_LOGPROB = -9999.0
"""The log-probability that OpenAI reports for an impossible token, because JSON has no infinity."""

Document = dict[str, Any]


class WholeAnswer(Protocol):
    """Builds the response bodies of an endpoint without streams."""

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        """Return the body of a response that is not streamed."""


@dataclass(frozen=True, slots=True)
class RawBody:
    """The body of a response that is no document, and the headers that describe it."""

    content: bytes
    headers: Mapping[str, str]


@runtime_checkable
class RawAnswer(Protocol):
    """Builds the response bodies of requests that ask for bytes."""

    def raw(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> RawBody:
        """Return the body of the response."""


class Answer(WholeAnswer, Protocol):
    """Builds one endpoint's response bodies. Use one object per request, because each event depends on earlier ones."""

    def events(self, delta: ChoiceDelta) -> bytes:
        """Return the events that a stream sends for a delta."""

    def end(self, usage: Usage) -> bytes:
        """Return the events that end a stream whose generation is complete."""

    def failure(self, error: ApiError) -> bytes:
        """Return the events that end a stream whose generation failed."""


def merged(deltas: Sequence[ChoiceDelta]) -> list[ChoiceDelta]:
    """Return one delta per choice, in the order of the choices."""
    groups: dict[int, JoinedDeltas] = {}
    for delta in deltas:
        groups.setdefault(delta.index, JoinedDeltas()).add(delta)
    return [group.delta() for _, group in sorted(groups.items())]


def name_by_id(token_id: int) -> str:
    """Return the name of a token for `return_tokens_as_token_ids`, as in vLLM."""
    return f"token_id:{token_id}"


def shown_logprob(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
