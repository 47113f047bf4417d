"""Answers of engines and their comparison, and the errors that end a benchmark."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.engine.protocol.messages import TokenLogprobs

TOLERANCE = 1e-3
"""Largest accepted difference between float32 log-probabilities. Tokens may differ if the two likeliest are this
close.
"""


class RunFailed(Exception):
    """The benchmark ended early. The message says why."""


class CheckError(RunFailed):
    """A check of the benchmark's results failed, so there are no figures."""


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    logprobs: list[TokenLogprobs]


def compare(found: dict[str, Answer], expected: dict[str, Answer], tolerance: float = TOLERANCE) -> tuple[float, int]:
    """The largest difference between log-probabilities, and the number of tokens that were compared.

    If the two likeliest tokens are within `tolerance`, a different choice is not an error, and the tokens after it are
    not compared. Raises CheckError for any other difference, or if fewer than half of the tokens could be compared.
    """
    worst, num_compared, num_tokens = 0.0, 0, 0
    for name, answer in found.items():
        num_tokens += len(expected[name].tokens)
        if len(answer.tokens) != len(expected[name].tokens):
            raise CheckError(f"{name} has {len(answer.tokens)} tokens instead of {len(expected[name].tokens)}")
        for position, (ours, theirs) in enumerate(zip(answer.logprobs, expected[name].logprobs, strict=True)):
            if ours.token_id != theirs.token_id:
                (_, best), (_, second) = theirs.top[:2]
                if best - second > tolerance:
                    raise CheckError(f"token {position} of {name} is {ours.token_id} instead of {theirs.token_id}")
                break
            difference = abs(ours.logprob - theirs.logprob)
            if not difference <= tolerance:
                raise CheckError(
                    f"the log-probability of token {position} of {name} is {ours.logprob:.5f} instead of "
                    f"{theirs.logprob:.5f}"
                )
            worst, num_compared = max(worst, difference), num_compared + 1
    if num_compared < num_tokens / 2:
        raise CheckError(f"near ties: only {num_compared} of {num_tokens} tokens could be compared")
    return worst, num_compared
