"""Clients that stream completions from a server: a fixed number of open requests, or random arrivals.

The requests are sent by the client of `loramux bench`, and only those of a window of time are observed.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.peers.system import SystemFailed
from loramux.admin.bench.answers import Answer, read_answer
from loramux.admin.bench.asks import COMPLETIONS, Ask
from loramux.admin.bench.load import run_load
from loramux.admin.client.openai_server import OpenAIServer

PATIENCE_S = 60.0


def greedy(model: str, prompt: tuple[int, ...], num_tokens: int) -> Ask:
    """A request whose answer has exactly `num_tokens` tokens."""
    return Ask(model=model, prompt=prompt, num_tokens=num_tokens, more={"ignore_eos": True})


@dataclass(frozen=True, slots=True)
class Observed:
    """The tokens of a load's answers. Times are in seconds on one clock."""

    first_tokens_s: list[float]
    """Times from when a request was due to its first token, for requests that were due in the window."""
    gaps_s: list[float]
    """Times between the chunks of an answer, for those requests."""
    tokens_s: float
    """Tokens per second that arrived in the window, from all requests."""
    num_prompt_tokens: int
    num_answer_tokens: int
    """Tokens of all requests, inside and outside the window."""
    num_requests: int


def closed_loop(server: OpenAIServer, asks: Iterator[Ask], num_open: int, warm_s: float, seconds: float) -> Observed:
    """Keep `num_open` requests open, and observe a window of `seconds` that begins after `warm_s`."""
    started = time.perf_counter()
    end_s = started + warm_s + seconds
    due = ((0.0, next(asks)) for _ in itertools.takewhile(lambda _: time.perf_counter() < end_s, itertools.repeat(0)))
    outcome = run_load(server, COMPLETIONS, due, max_open=num_open, timeout_s=warm_s + seconds + PATIENCE_S)
    # A request of a closed loop is due when there is a place for it.
    answers = ((received.sent_s, read_answer(received)) for received in outcome.received)
    return observe(answers, started + warm_s, end_s)


def open_loop(server: OpenAIServer, due: Sequence[tuple[float, Ask]], warm_s: float, seconds: float) -> Observed:
    """Send each request at its time in seconds, whatever is still open, and observe as in `closed_loop`."""
    started = time.perf_counter()
    outcome = run_load(server, COMPLETIONS, due, timeout_s=warm_s + seconds + PATIENCE_S)
    answers = ((received.due_s, read_answer(received)) for received in outcome.received)
    return observe(answers, started + warm_s, started + warm_s + seconds)


def observe(answers: Iterable[tuple[float, Answer]], begin_s: float, end_s: float) -> Observed:
    """Observe answers, each with the time when it was due.

    Raises SystemFailed if one failed or does not have the requested number of tokens.
    """
    first_tokens, gaps = [], []
    num_in_window = 0.0
    num_prompt = num_answer = num_requests = 0
    for due_s, answer in answers:
        times = _times(answer)
        num_requests += 1
        num_prompt += answer.num_prompt
        num_answer += answer.num_tokens
        num_inside = sum(begin_s <= at_s < end_s for at_s in times)
        # A chunk can carry several tokens, so count each chunk as an equal part of the answer.
        num_in_window += answer.num_tokens * num_inside / len(times)
        if begin_s <= due_s < end_s:
            first_tokens.append(times[0] - due_s)
            gaps += [later - earlier for earlier, later in itertools.pairwise(times)]
    tokens_s = num_in_window / (end_s - begin_s)
    return Observed(first_tokens, gaps, tokens_s, num_prompt, num_answer, num_requests)


def _times(answer: Answer) -> list[float]:
    """Return the times of the chunks that carry text."""
    ask = answer.received.ask
    if answer.error is not None:
        raise SystemFailed(f"{ask.model} answers {answer.error}")
    times = [at_s for at_s, text in zip(answer.times_s, answer.texts, strict=True) if text]
    if answer.has_other_length or not answer.is_counted or not times:
        raise SystemFailed(f"{ask.model} answered {answer.num_tokens} instead of {ask.num_tokens} tokens")
    return times


def arrivals(
    asks: Iterator[Ask], requests_s: float, seconds: float, uniform: Callable[[], float]
) -> list[tuple[float, Ask]]:
    """Poisson arrivals at this rate. `uniform` draws from [0, 1)."""
    due, at_s = [], 0.0
    while (at_s := at_s - math.log(1.0 - uniform()) / requests_s) < seconds:
        due.append((at_s, next(asks)))
    return due
