"""Turns the options of `loramux bench` into requests, and tries the server before the load."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from loramux.admin.bench.answers import Answer, read_answer
from loramux.admin.bench.arrivals import arrival_times
from loramux.admin.bench.asks import Ask, Lengths, PromptScale, RandomPrompts, WorkloadError, random_words, zipf_models
from loramux.admin.bench.files import read_dataset, read_trace
from loramux.admin.bench.load import run_load
from loramux.admin.client.openai_server import OpenAIServer

DEFAULT_REQUESTS = 100
SHORT_WORDS, LONG_WORDS = 8, 40
"""Words of the two prompts that show how many tokens a word has."""


class TrialFailed(Exception):
    """The server did not answer a request before the load. The message is its error."""

    def __init__(self, message: str, *, is_unreachable: bool) -> None:
        super().__init__(message)
        self.is_unreachable = is_unreachable


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What to send. With a trace, the trace says when to send each request and how long it is."""

    endpoint: str
    models: Sequence[str]
    """The model names, from the most to the least frequent."""
    num_requests: int | None
    """None means all requests of the file, or 100 without one."""
    requests_s: float = math.inf
    burstiness: float = 1.0
    max_open: int | None = None
    """Most requests that are open at once, or None for no limit."""
    prompt: Lengths
    answer: Lengths
    ids: Lengths | None = None
    dataset: Path | None = None
    trace: Path | None = None
    zipf: float = 0.0
    seed: int = 0
    more: Mapping[str, Any]
    """Fields that are added to every request's body."""

    def check(self) -> None:
        """Raises WorkloadError if the options contradict each other."""
        if self.dataset is not None and self.trace is not None:
            raise WorkloadError("give either --dataset or --trace")
        if self.trace is not None and math.isfinite(self.requests_s):
            raise WorkloadError("a trace has its own times: leave --rate out")
        if self.ids is not None and (self.endpoint != "completions" or self.dataset is not None):
            raise WorkloadError("--token-ids needs --endpoint completions, and no --dataset")
        if any(map(math.isnan, (self.requests_s, self.burstiness, self.zipf))):
            raise WorkloadError("--rate, --burstiness and --zipf must be numbers")
        try:
            msgspec.json.encode([self.models, self.more])
        except UnicodeEncodeError:
            raise WorkloadError("--model or --extra-body has characters that JSON cannot carry") from None
        if self.answer.low < 1:
            raise WorkloadError("--answer-tokens must be at least 1")

    def due(self, scale: PromptScale) -> list[tuple[float, Ask]]:
        """Return the requests with their times in seconds. Raises WorkloadError for a file that cannot be used."""
        dice = random.Random(self.seed)
        models = zipf_models(self.models, self.zipf, dice)
        prompts = RandomPrompts(scale=scale, ids=self.ids)
        if self.trace is not None:
            asks = read_trace(self.trace, prompts, models, dice)[: self.num_requests]
            return [(ask.at_s or 0.0, self._whole(ask)) for ask in asks]
        if self.dataset is not None:
            found = read_dataset(self.dataset, self.endpoint, self.answer, models, dice)
            asks = list(itertools.islice(itertools.cycle(found), self.num_requests or len(found)))
        else:
            asks = list(itertools.islice(self._drawn(prompts, models, dice), self.num_requests or DEFAULT_REQUESTS))
        times = arrival_times(len(asks), self.requests_s, self.burstiness, dice)
        return [(at_s, self._whole(ask)) for at_s, ask in zip(times, asks, strict=True)]

    def _drawn(self, prompts: RandomPrompts, models: Iterator[str], dice: random.Random) -> Iterator[Ask]:
        for model in models:
            prompt = prompts.draw(self.prompt.draw(dice), dice)
            yield Ask(model=model, prompt=prompt, num_tokens=self.answer.draw(dice))

    def _whole(self, ask: Ask) -> Ask:
        return Ask(model=ask.model, prompt=ask.prompt, num_tokens=ask.num_tokens, at_s=ask.at_s, more=self.more)


@dataclass(frozen=True, slots=True)
class Run:
    """The answers of a load, in the order of the requests, and its duration."""

    answers: list[Answer]
    seconds: float


def run_workload(
    server: OpenAIServer,
    workload: Workload,
    timeout_s: float,
    progress: Callable[[int], Callable[[int], None]],
) -> Run:
    """Send a trial request, then the load. `progress` is given the number of requests and returns `advance`.

    Raises WorkloadError, or TrialFailed if the server does not answer the trial.
    """
    workload.check()
    is_scaled = workload.dataset is None and workload.ids is None
    due = workload.due(PromptScale())
    if is_scaled:
        due = workload.due(_scale(server, workload, timeout_s))
    # The first request is sent once before, as in vLLM's benchmark: it loads the adapter and shows errors early.
    _try(server, workload.endpoint, due[0][1], timeout_s)
    outcome = run_load(
        server, workload.endpoint, due, max_open=workload.max_open, timeout_s=timeout_s, advance=progress(len(due))
    )
    return Run([read_answer(received) for received in outcome.received], outcome.seconds)


def _scale(server: OpenAIServer, workload: Workload, timeout_s: float) -> PromptScale:
    dice = random.Random(f"scale {workload.seed}")
    found = []
    for num_words in (SHORT_WORDS, LONG_WORDS):
        ask = Ask(model=workload.models[0], prompt=random_words(num_words, dice), num_tokens=1, more=workload.more)
        found.append((num_words, _try(server, workload.endpoint, ask, timeout_s).num_prompt))
    return PromptScale.of(found[0], found[1])


def _try(server: OpenAIServer, endpoint: str, ask: Ask, timeout_s: float) -> Answer:
    (received,) = run_load(server, endpoint, [(0.0, ask)], timeout_s=timeout_s).received
    answer = read_answer(received)
    if answer.error is not None:
        raise TrialFailed(answer.error, is_unreachable=received.status == 0)
    return answer
