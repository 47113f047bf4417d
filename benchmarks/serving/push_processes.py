"""The processes beside the server in the push benchmark: the trainer, and the clients that read the streams.

In one process, they would wait for each other's interpreter lock, and the gaps between tokens would include that wait.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from safetensors.torch import load_file

from benchmarks.answers import CheckError
from benchmarks.peers.vocabulary import FIRST_WORD
from benchmarks.serving.clients import closed_loop, greedy
from loramux.adapter_store.sandbox.fork_server import lower_priority
from loramux.admin.bench.asks import Ask
from loramux.admin.client.openai_server import OpenAIServer
from loramux.admin.client.weights_push import WeightsPush

TRAINER_NICENESS = 19
"""Niceness of the trainer. A trainer on another machine takes no processor time from the server at all."""
END_S = 10.0


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """Where to push, and the weights: `files` are safetensors files, and `marked` is the tensor in which versions
    differ.
    """

    url: str
    key: str
    files: Sequence[Path]
    marked: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pushed:
    """A push that has returned. Times are in seconds on `time.perf_counter`, which all processes share."""

    version: int
    began_s: float
    ended_s: float
    stages: str
    """The header Server-Timing."""


class Trainer:
    """Pushes versions from a process of its own. Use it in a `with` block."""

    def __init__(self, options: TrainerOptions) -> None:
        context = multiprocessing.get_context("spawn")
        self._link, theirs = context.Pipe()
        self._process = context.Process(target=_train, args=(theirs, options), daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()
        self._process.join(END_S)
        self._process.kill()

    def push(self, adapter: str, variant: int, number: int) -> Pushed:
        """Push a variant of the weights as version `number` of all versions, and point `default` at it.

        Raises CheckError.
        """
        self._link.send((adapter, variant, number))
        try:
            answer = self._link.recv()
        except EOFError:
            raise CheckError("the trainer's process has ended") from None
        if isinstance(answer, str):
            raise CheckError(f"a push failed: {answer}")
        assert isinstance(answer, Pushed)
        return answer


def own(tensors: Mapping[str, Any], marked: str, number: int) -> dict[str, Any]:
    """The weights with two elements that no other version has, too small to be noticed."""
    changed = tensors[marked].clone()
    changed[0, 0], changed[0, 1] = (2.0**-20 * (1 + part) for part in divmod(number, 256))
    return {**tensors, marked: changed}


def _train(link: Connection, options: TrainerOptions) -> None:
    # Linux may compare niceness only within a session.
    os.setsid()
    lower_priority(TRAINER_NICENESS)
    variants = [load_file(file) for file in options.files]
    clients: dict[str, WeightsPush] = {}
    timing = ""

    def note(response: Any) -> None:
        nonlocal timing
        timing = response.headers.get("server-timing", timing)

    while True:
        try:
            adapter, variant, number = link.recv()
        except EOFError:
            return
        try:
            if adapter not in clients:
                clients[adapter] = WeightsPush(options.url, options.key, adapter)
                clients[adapter]._http.event_hooks["response"].append(note)
            tensors = own(variants[variant], options.marked, number)
            began_s = time.perf_counter()
            version = clients[adapter].push(tensors, options.config, alias="default", wait="resident").version
            link.send(Pushed(version, began_s, time.perf_counter(), timing))
        except Exception as error:
            link.send(f"{type(error).__name__}: {error}")


def stream_gaps(
    api: OpenAIServer,
    models: Sequence[str],
    *,
    num_open: int,
    answer_tokens: int,
    vocab_size: int,
    warm_s: float,
    seconds: float,
) -> list[float]:
    """Keep streams on these models open, and return the gaps between their tokens in a window after `warm_s`."""
    asks = _streams(models, answer_tokens, vocab_size)
    return closed_loop(api, asks, num_open, warm_s, seconds).gaps_s


def _streams(models: Sequence[str], answer_tokens: int, vocab_size: int) -> Iterator[Ask]:
    dice = random.Random(2)
    for model in itertools.cycle(models):
        tokens = (dice.randrange(FIRST_WORD, vocab_size) for _ in range(32))
        yield greedy(model, tuple(tokens), answer_tokens)
