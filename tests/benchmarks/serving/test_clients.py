from __future__ import annotations

import itertools
import json
import random

import pytest

from benchmarks.peers.system import SystemFailed
from benchmarks.serving.clients import arrivals, greedy, observe
from loramux.admin.bench.answers import Answer, read_answer
from loramux.admin.bench.load import Received

ASK = greedy("acme/support", (1, 2, 3), 3)


def received(texts: list[str], due_s: float, num_answer: int = 3, status: int = 200) -> tuple[float, Answer]:
    """An answer whose first read is at `due_s + 1`, with one chunk per second."""
    events = [{"choices": [{"text": text}]} for text in texts]
    events.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": num_answer}})
    reads = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    times = [due_s + 1 + number for number in range(len(reads))]
    return due_s, read_answer(Received(ASK, due_s, status=status, data=reads, times_s=times))


def test_only_requests_that_were_due_in_the_window_are_timed() -> None:
    inside, before = received(["a", "b", "c"], 10.0), received(["a", "bc", ""], 7.5)
    observed = observe([inside, before], 9.0, 14.0)
    assert observed.first_tokens_s == [1.0]
    assert observed.gaps_s == [1.0, 1.0]
    # All three tokens of one answer, and the second of the other answer's two chunks.
    assert observed.tokens_s == pytest.approx((3 + 3 / 2) / 5)
    assert (observed.num_requests, observed.num_prompt_tokens, observed.num_answer_tokens) == (2, 6, 6)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (received(["a"], 0.0, num_answer=2), "instead of 3 tokens"),
        (received(["a"], 0.0, status=429), "the server returned 429"),
        (received([], 0.0), "instead of 3 tokens"),
    ],
    ids=["short", "refused", "no text"],
)
def test_an_answer_that_failed_ends_the_benchmark(answer: tuple[float, Answer], problem: str) -> None:
    with pytest.raises(SystemFailed, match=problem):
        observe([answer], 0.0, 10.0)


def test_arrivals_have_the_wanted_rate() -> None:
    due = arrivals(itertools.repeat(ASK), 50.0, 100.0, random.Random(0).random)
    times = [at_s for at_s, _ in due]
    assert times == sorted(times)
    assert len(times) == pytest.approx(5000, rel=0.05)
    assert times[-1] < 100.0
