"""Streams of chunks, as the chat and completions endpoints of OpenAI send them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from loramux.platform.bodies.generation_request import GenerationRequest
from loramux.platform.errors import ApiError
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.requests import sse
from loramux.platform.requests.answers import Document
from loramux.platform.requests.endpoint import Prompts

Chunk = Document | msgspec.Raw
"""A chunk of a stream, possibly already encoded."""


class Chunked(Protocol):
    """Builds one endpoint's documents. Use one object per request, because each chunk depends on earlier ones."""

    def chunks(self, delta: ChoiceDelta, so_far: UsageSoFar | None = None) -> list[Chunk]:
        """Return the chunks that a stream sends for a delta. With `so_far`, each reports the tokens that it and the
        chunks before it carried.
        """

    def usage_chunk(self, usage: Usage) -> Document:
        """Return the last chunk of a stream, which is sent if the client asked for usage."""

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedAnswer:
    """An `Answer` that is streamed in chunks. With `so_far`, each chunk reports the usage so far."""

    documents: Chunked
    include_usage: bool
    so_far: UsageSoFar | None

    def events(self, delta: ChoiceDelta) -> bytes:
        return b"".join(map(sse.event, self.documents.chunks(delta, self.so_far)))

    def end(self, usage: Usage) -> bytes:
        last = sse.event(self.documents.usage_chunk(usage)) if self.include_usage else b""
        return last + sse.DONE

    def failure(self, error: ApiError) -> bytes:
        return sse.event(error.envelope())

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        return self.documents.whole(deltas, usage)


def chunked(documents: Chunked, body: GenerationRequest, prompts: Prompts) -> ChunkedAnswer:
    """Return the answer to `body`, whose `prompts` are tokenised."""
    so_far = UsageSoFar(sum(map(len, prompts))) if body.continuous_usage else None
    return ChunkedAnswer(documents=documents, include_usage=body.include_usage, so_far=so_far)


def fingerprint_field(fingerprint: str | None) -> Document:
    """OpenAI's field for the configuration that made an answer: here, the adapter's version. Absent for the base."""
    return {} if fingerprint is None else {"system_fingerprint": fingerprint}


_MARK = secrets.token_hex(16)
"""Stands for the text in a template. No client can know it."""


class ChunkTemplates:
    """Encodes chunks that differ only in their text, which is faster than encoding whole documents."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[bytes, bytes]] = {}

    def chunk(self, index: int, text: str, make: Callable[[int, str], Document]) -> msgspec.Raw:
        """Return the chunk with this text for the choice. `make(index, text)` makes one, which serves as the template
        of all later ones.
        """
        parts = self._parts.get(index)
        if parts is None:
            before, after = msgspec.json.encode(make(index, _MARK)).split(msgspec.json.encode(_MARK))
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
    details: Document = {}
    if usage.reasoning_tokens is not None:
        details["reasoning_tokens"] = usage.reasoning_tokens
    if usage.predicted is not None:
        details["accepted_prediction_tokens"] = usage.predicted.accepted
        details["rejected_prediction_tokens"] = usage.predicted.rejected
    if details:
        body["completion_tokens_details"] = details
    return body
