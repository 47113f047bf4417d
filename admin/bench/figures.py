"""The figures of a load. They are defined as in `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loramux.admin.bench.answers import Answer
from loramux.admin.bench.asks import WorkloadError

MEASURES: Mapping[str, str] = {
    "ttft": "first token",
    "tpot": "per token",
    "itl": "gap",
    "e2el": "whole answer",
}
"""What is timed in each request: its name in vLLM's files, and in our tables."""

PERCENTILES = (50, 90, 99)
OBJECTIVES = ("ttft", "tpot", "e2el")
"""The measures that have one time per request."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of times in milliseconds. All are 0 if there are no times."""

    mean: float
    std: float
    percentiles: Mapping[int, float]

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        milliseconds = np.asarray(seconds or (0.0,), dtype=np.float64) * 1e3
        found = np.percentile(milliseconds, PERCENTILES)
        return cls(
            float(milliseconds.mean()),
            float(milliseconds.std()),
            dict(zip(PERCENTILES, map(float, found), strict=True)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Times are in milliseconds, rates per second, and `duration_s` in seconds.

    Tokens and times are those of completed requests.
    """

    duration_s: float
    completed: int
    failed: int
    num_prompt_tokens: int
    num_answer_tokens: int
    num_other_lengths: int
    """Completed answers that do not have the requested number of tokens."""
    num_uncounted: int
    """Completed answers without usage, whose events were counted instead of tokens."""
    num_good: int | None
    """Completed requests that met the objectives, or None if none are set."""
    spreads: Mapping[str, Spread]
    """By the names in `MEASURES`."""

    @property
    def requests_s(self) -> float:
        return self.completed / self.duration_s

    @property
    def goodput_s(self) -> float | None:
        return None if self.num_good is None else self.num_good / self.duration_s

    @property
    def answer_tokens_s(self) -> float:
        return self.num_answer_tokens / self.duration_s

    @property
    def tokens_s(self) -> float:
        return (self.num_prompt_tokens + self.num_answer_tokens) / self.duration_s


def measure(answers: Sequence[Answer], duration_s: float, objectives: Mapping[str, float]) -> Figures:
    """Compute the figures. `objectives` are the longest acceptable times in milliseconds, by measure."""
    completed = [answer for answer in answers if answer.error is None]
    times: dict[str, list[float]] = {
        "ttft": [answer.first_token_s for answer in completed],
        "tpot": [answer.time_per_token_s for answer in completed if answer.num_tokens > 1],
        "itl": [gap for answer in completed for gap in answer.gaps_s],
        "e2el": [answer.latency_s for answer in completed],
    }
    return Figures(
        duration_s=duration_s,
        completed=len(completed),
        failed=len(answers) - len(completed),
        num_prompt_tokens=sum(answer.num_prompt for answer in completed),
        num_answer_tokens=sum(answer.num_tokens for answer in completed),
        num_other_lengths=sum(answer.has_other_length for answer in completed),
        num_uncounted=sum(not answer.is_counted for answer in completed),
        num_good=sum(_is_good(answer, objectives) for answer in completed) if objectives else None,
        spreads={name: Spread.of(seconds) for name, seconds in times.items()},
    )


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """Read `ttft:200 tpot:50`, in milliseconds. Raises WorkloadError."""
    found = {}
    for word in " ".join(texts).replace(",", " ").split():
        name, _, value = word.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in OBJECTIVES or not 0 < limit < float("inf"):
            raise WorkloadError(f"--slo {word[:40]!r}: it should be NAME:MILLISECONDS, with {', '.join(OBJECTIVES)}")
        found[name] = limit
    return found


def _is_good(answer: Answer, objectives: Mapping[str, float]) -> bool:
    taken = {"ttft": answer.first_token_s, "tpot": answer.time_per_token_s, "e2el": answer.latency_s}
    return all(taken[name] * 1e3 <= limit for name, limit in objectives.items())
