"""Tokens per second beside llama.cpp, which reads the GGUF file itself. Both systems take turns."""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.machine import busy_share
from loramux.engine.llm import LLM, SamplingParams
from tests.environments import ENVIRONMENTS, ROOT
from tests.real.findings import Finding
from tests.real.models import FORMATS, RealModel

STREAMS = (1, 4, 16)
NUM_PROMPT, NUM_TOKENS = 16, 64
ROUNDS = 3
NUM_THREADS = 2
WORKER = Path(__file__).parent / "inside" / "llama.py"
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)

Ask = Callable[[list[list[int]]], float]
"""Answers prompts together, and returns the seconds that this took."""


def speed(model: RealModel, num_prompts: int) -> Iterator[Finding]:
    chance = random.Random(0)
    command = [str(ROOT / ENVIRONMENTS["gguf"].folder / "bin" / "python"), str(WORKER), str(model.gguf)]
    with subprocess.Popen(
        [*command, str(NUM_THREADS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as worker:
        for kind in FORMATS:
            busy = busy_share()
            with model.open(kind, num_threads=NUM_THREADS) as llm:
                for streams in STREAMS:
                    ours, theirs = _in_turns(
                        lambda ids: _loramux(llm, ids), lambda ids: _llama(worker, ids), streams, chance
                    )
                    yield Finding(
                        model=model.name,
                        what=f"{kind}, {streams} streams",
                        figures={
                            "loramux": round(ours, 1),
                            "llama.cpp": round(theirs, 1),
                            "ratio": round(ours / theirs, 2),
                            "busy_before": round(busy, 2),
                        },
                    )
        assert worker.stdin is not None
        worker.stdin.close()


def _in_turns(ours: Ask, theirs: Ask, streams: int, chance: random.Random) -> tuple[float, float]:
    """Return tokens per second, the medians of the rounds. One round before them warms up."""
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS + 1):
        for ask, seen in zip((ours, theirs), rates, strict=True):
            prompts = [[chance.randrange(100, 40_000) for _ in range(NUM_PROMPT)] for _ in range(streams)]
            seen.append(streams * NUM_TOKENS / ask(prompts))
    return statistics.median(rates[0][1:]), statistics.median(rates[1][1:])


def _loramux(llm: LLM, prompts: list[list[int]]) -> float:
    started = time.perf_counter()
    answers = llm.generate(prompts, max_tokens=NUM_TOKENS, sampling=GREEDY)
    assert all(len(answer.token_ids) == NUM_TOKENS for answer in answers)
    return time.perf_counter() - started


def _llama(worker: subprocess.Popen[str], prompts: list[list[int]]) -> float:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps({"prompts": prompts, "num_tokens": NUM_TOKENS}) + "\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError("llama.cpp ended without an answer")
    return float(json.loads(line)["seconds"])
