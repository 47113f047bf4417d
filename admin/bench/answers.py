"""Reads the answers of a load after it has ended."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from loramux.admin.bench.load import Received
from loramux.admin.client.openai_errors import error_text
from loramux.admin.client.sse import EventReader, StreamTooLong


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer's tokens and times. Times are in seconds, on one clock for a load."""

    received: Received
    times_s: tuple[float, ...]
    """When each event with a part of the answer was read. An event can carry several tokens."""
    num_prompt: int
    """Tokens of the prompt. 0 if the server reports no usage."""
    num_tokens: int
    """Tokens of the answer. The number of events if the server reports no usage."""
    is_counted: bool
    """Whether the server reported the numbers of tokens."""
    text: str
    error: str | None
    """Why the request failed, or None."""

    @property
    def first_token_s(self) -> float:
        """Time from sending the request to the first event."""
        return self.times_s[0] - self.received.sent_s

    @property
    def latency_s(self) -> float:
        """Time from sending the request to the last event."""
        return self.times_s[-1] - self.received.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.times_s)]

    @property
    def time_per_token_s(self) -> float:
        """Mean time of a token after the first. 0 if there is only one."""
        return (self.latency_s - self.first_token_s) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0

    @property
    def has_other_length(self) -> bool:
        wanted = self.received.ask.num_tokens
        return self.error is None and wanted is not None and self.num_tokens != wanted


def read_answer(received: Received) -> Answer:
    """Parse an answer. A failed or malformed one has an `error`."""
    error, parts = received.error, _Parts()
    if error is None and received.status != 200:
        error = error_text(received.status, b"".join(received.data))
    if error is None:
        try:
            error = parts.read(received)
        except (msgspec.DecodeError, StreamTooLong, AttributeError, LookupError, TypeError, ValueError, RecursionError):
            error = "the answer is not a stream of events of an OpenAI API"
    if error is None and not parts.times_s:
        error = "the answer has no tokens"
    is_counted = error is None and parts.num_tokens > 0
    return Answer(
        received=received,
        times_s=tuple(parts.times_s),
        num_prompt=parts.num_prompt if is_counted else 0,
        num_tokens=parts.num_tokens if is_counted else len(parts.times_s),
        is_counted=is_counted,
        text="".join(parts.texts),
        error=error,
    )


@dataclass(slots=True)
class _Parts:
    """What the events of an answer contain."""

    times_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    num_prompt: int = 0
    num_tokens: int = 0

    def read(self, received: Received) -> str | None:
        """Return the error with which the stream ended, if any."""
        reader, usage_s = EventReader(), None
        for at_s, data in zip(received.times_s, received.data, strict=True):
            for event in reader.feed(data):
                if not event.startswith(b"{"):
                    continue
                document = msgspec.json.decode(event)
                if "error" in document:
                    return error_text(200, event)
                if usage := document.get("usage"):
                    self.num_prompt = _count(usage["prompt_tokens"])
                    self.num_tokens = _count(usage["completion_tokens"])
                    usage_s = at_s
                text = _part(document)
                if text is not None:
                    self.times_s.append(at_s)
                    self.texts.append(text)
        # Tokens can have no text. Then they have arrived with the usage at the latest.
        if not self.times_s and self.num_tokens and usage_s is not None:
            self.times_s.append(usage_s)
        return None


def _count(value: object) -> int:
    if not (isinstance(value, int) and 0 <= value < 1 << 53):
        raise ValueError("not a number of tokens")
    return value


def _part(event: Mapping[str, Any]) -> str | None:
    """Return the text of an event that carries tokens, otherwise None.

    As in `vllm bench serve`, an event of a completion counts even if its text is empty, and the opening event of a chat
    answer, which has only a role, does not count.
    """
    choices = event.get("choices")
    if not choices:
        return None
    choice = choices[0]
    if "delta" not in choice:
        return str(choice.get("text") or "")
    delta = choice["delta"]
    content = delta.get("content")
    has_tokens = content or any(
        delta.get(name) for name in ("reasoning", "reasoning_content", "tool_calls", "function_call")
    )
    return str(content or "") if has_tokens or (content == "" and "role" not in delta) else None
