"""`loramux bench` beside `vllm bench serve` on one server: the figures of both must agree within 2 %."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from loramux.engine.protocol.messages import Add
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from tests.admin.command_line import invoke
from tests.admin.scripted_gateway import MODEL, Gateway, open_gateway
from tests.demo_base import DEMO_BASE
from tests.harnesses.finding import Finding
from tests.harnesses.tools import INSIDE, STAND_IN, run_tool
from tests.platform.scripted_engine import Script

NUM_REQUESTS, NUM_OPEN, PROMPT, ANSWER = 20, 4, 64, 8
STEP_S = 0.25
"""Time of a token. A real engine's times vary by more than the tolerance from run to run, and so do percentiles of a
few requests.
"""

ROUNDS = 3
TOLERANCE = 0.02
TEXT = "the cat and the dog and the man and the boy went to the house and the land and the water"
# The lengths of prompts are not compared: the programs draw random words and random tokens.
FIGURES = (
    *("total_output_tokens", "request_throughput", "output_throughput"),
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in ("mean", "median")),
)


def bench_beside_vllm(files: Path, scratch: Path) -> Iterator[Finding]:
    """Run both in turn on a gateway of ours whose engine emits a token of each answer every `STEP_S`."""
    words = tuple(ModelTokenizer.load(DEMO_BASE).encode(TEXT))[:ANSWER]

    def steady(add: Add) -> Script:
        return Script(token_ids=words[: add.max_tokens], delay_s=STEP_S)

    with open_gateway(scratch, DEMO_BASE, steady) as gateway:
        for endpoint in ("completions", "chat"):
            runs: dict[Callable[..., dict[str, Any]], list[Mapping[str, Any]]] = {_vllm: [], _ours: []}
            for number in range(ROUNDS):
                for program in (_vllm, _ours) if number % 2 else (_ours, _vllm):
                    runs[program].append(program(gateway, endpoint, files, scratch))
            yield from _compared(endpoint, *runs.values())


def _vllm(gateway: Gateway, endpoint: str, files: Path, scratch: Path) -> dict[str, Any]:
    url = gateway.server.url.removesuffix("/v1")
    backend, path = (
        ("openai", "/v1/completions") if endpoint == "completions" else ("openai-chat", "/v1/chat/completions")
    )
    command = ["python", str(INSIDE / "vllm_bench.py"), "--backend", backend, "--endpoint", path, "--base-url", url]
    command += ["--header", f"Authorization=Bearer {gateway.server.key}", "--model", MODEL, "--ignore-eos"]
    command += ["--tokenizer", str(DEMO_BASE), "--num-prompts", str(NUM_REQUESTS), "--max-concurrency", str(NUM_OPEN)]
    command += ["--random-input-len", str(PROMPT), "--random-output-len", str(ANSWER), "--disable-tqdm"]
    command += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result", "--result-filename", "vllm.json"]
    run_tool("vllm", command, scratch, paths=(STAND_IN, files))
    return dict(json.loads((scratch / "vllm.json").read_text()))


def _ours(gateway: Gateway, endpoint: str, _files: Path, scratch: Path) -> dict[str, Any]:
    command = ["bench", "--model", MODEL, "--endpoint", endpoint, "--requests", NUM_REQUESTS, "--concurrency", NUM_OPEN]
    command += ["--prompt-tokens", PROMPT, "--answer-tokens", ANSWER, "--out", scratch / "ours.json"]
    done = invoke(*command, env=gateway.variables)
    assert done.exit_code == 0, done.output
    return dict(json.loads((scratch / "ours.json").read_text()))


def _compared(endpoint: str, theirs: list[Mapping[str, Any]], ours: list[Mapping[str, Any]]) -> Iterator[Finding]:
    for name in FIGURES:
        first, second = (statistics.median(run[name] for run in runs) for runs in (theirs, ours))
        is_right = abs(second / first - 1) <= TOLERANCE
        yield Finding("loramux bench", f"{endpoint}: {name}", f"{second:.2f}", f"{first:.2f} within 2 %", is_right)
