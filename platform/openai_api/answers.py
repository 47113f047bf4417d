"""Builds the response bodies that carry a generation to an OpenAI client, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage

LOWEST_LOGPROB = -9999.0
"""The log-probability that OpenAI reports for an impossible token, because JSON has no infinity."""

Document = dict[str, Any]


class Answer(Protocol):
    """Builds one endpoint's response bodies. Use one object per request, because each chunk depends on earlier ones."""

    def chunks(self, delta: ChoiceDelta) -> list[Document]:
        """The chunks that a stream sends for a delta."""

    def usage_chunk(self, usage: Usage) -> Document:
        """The last chunk of a stream whose client asked for usage."""

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document: ...


def merged(deltas: Sequence[ChoiceDelta]) -> list[ChoiceDelta]:
    groups: dict[int, list[ChoiceDelta]] = {}
    for delta in deltas:
        groups.setdefault(delta.index, []).append(delta)
    return [
        ChoiceDelta(
            index=index,
            text="".join(delta.text for delta in group),
            logprobs=tuple(entry for delta in group for entry in delta.logprobs),
            finish_reason=group[-1].finish_reason,
            token_ids=tuple(token_id for delta in group for token_id in delta.token_ids),
            reasoning="".join(delta.reasoning for delta in group),
            prompt_logprobs=tuple(entry for delta in group for entry in delta.prompt_logprobs),
        )
        for index, group in sorted(groups.items())
    ]


class UsageSoFar:
    """The usage so far, for clients that ask for it in each chunk of a stream."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0

    def after(self, delta: ChoiceDelta) -> Document:
        self._completion_tokens += len(delta.token_ids)
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


def shown_logprob(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
