"""How a generation is told to an OpenAI client: whole, or in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage

LOWEST_LOGPROB = -9999.0
"""What OpenAI says for a token that cannot happen; JSON has no infinity."""

Document = dict[str, Any]


class Answer(Protocol):
    """The bodies of one endpoint. One object a request: chunks depend on those before."""

    def chunks(self, delta: ChoiceDelta) -> list[Document]:
        """What a stream sends for a delta."""

    def usage_chunk(self, usage: Usage) -> Document:
        """The last chunk of a stream whose client asked for usage."""

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        """The body of an answer that is not streamed."""


def merged(deltas: Sequence[ChoiceDelta]) -> list[ChoiceDelta]:
    """One delta a choice that holds all of its news, by index."""
    groups: dict[int, list[ChoiceDelta]] = {}
    for delta in deltas:
        groups.setdefault(delta.index, []).append(delta)
    return [
        ChoiceDelta(
            index=index,
            text="".join(delta.text for delta in group),
            logprobs=tuple(entry for delta in group for entry in delta.logprobs),
            finish_reason=group[-1].finish_reason,
        )
        for index, group in sorted(groups.items())
    ]


def usage_body(usage: Usage) -> Document:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def shown_logprob(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
