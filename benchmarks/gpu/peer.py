"""Measures vLLM beside loramux on one card, with the same random weights, adapters and prompts.

`--peers` names the folder that `vllm_parts.py` unpacked. vLLM runs in a process of its own (`vllm_child.py`), once with
LoRA and once without. It makes the same weights on the device and reads the same adapters as PEFT files. Before its
times count, the tokens that both generate are compared. If vLLM does not start, answers differently or takes too long,
its rows say so in one sentence, and loramux's rows remain.

Times are those of the wall clock, because a peer's steps cannot be observed on the device: a decode step with all
sequences, and the time from the first of several prompts to the last first token.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.answers import Answer, CheckError, compare
from benchmarks.gpu import check as gpu_check
from benchmarks.gpu import step as gpu_step
from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.engine import ObservedEngine, engine_dtype, open_engine
from benchmarks.gpu.model import Model, model_of
from benchmarks.gpu.prefill import PrefillCase
from benchmarks.gpu.random_models import (
    ALL_MODULES,
    RandomAdapters,
    llama_config,
    model_config,
    random_prompt,
    write_peft,
)
from benchmarks.gpu.step import RANK, StepCase
from benchmarks.gpu.vllm_child import NUM_STAGGERED, NUM_WARM_STEPS, PeerToken, VllmFigures, VllmJob
from benchmarks.gpu.warm import WarmStep, warm_steps
from benchmarks.running_engine import greedy_adds
from loramux.engine.architectures.weight_shapes import weight_shapes
from loramux.engine.loop.loaded_base import DTYPES
from loramux.engine.protocol.messages import SamplingParams, TokenLogprobs

CHILD_FILES = ("vllm_child.py", "random_weights.py")
NUM_PREFILLS, NUM_WARM_PREFILLS = 9, 3
NUM_CHECKED = 4
CHECKED_PROMPT = 24
VLLM_BATCH_TOKENS = 8192
"""Most tokens of a step of vLLM, so that the decoding sequences' prompts are computed in few steps."""

VLLM_PROCESSES = {"with LoRA": 170.0, "without LoRA": 140.0}
"""Longest time of each process, in seconds. The one with LoRA also measures the base."""

TOLERANCES = {"bfloat16": 0.15, "float32": 1e-3}
"""Largest accepted difference between log-probabilities of vLLM and loramux."""

VLLM_SETTINGS = {
    # Run the engine in the process that registers the weights.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # FlashInfer is not part of the copy, and greedy decoding needs no sampler.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # The machine may have no network, and vLLM's group of one process looks for an address.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """The decode and the prefill to measure, and the number of adapters."""

    decode: StepCase
    prefill: PrefillCase
    num_adapters: int


def plan_of(bench: Bench) -> Plan:
    return Plan(StepCase(2, 20), PrefillCase(2, 3), 2) if bench.is_tiny else Plan(
        StepCase(64, 1024), PrefillCase(16, 128), 16
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a decode step and of a prefill."""

    step_s: float
    prefill_s: float


BASE, ADAPTERS = KINDS = ("base", "adapters")


def run(bench: Bench) -> Iterator[Row]:
    yield gpu_check.require_right_engine(bench)
    plan, model = plan_of(bench), model_of(bench)
    adapters = RandomAdapters(bench, model, engine_dtype(bench))
    digests = [f"a{place}" for place in range(plan.num_adapters)]
    for place, digest in enumerate(digests):
        adapters.make([digest], RANK, seed=place)
    expected: dict[str, list[Answer]] = {}
    own: dict[str, Times] = {}
    yield from _loramux(bench, plan, adapters, digests, expected, own)
    # vLLM needs the memory of the engine, which the generator has closed.
    bench.drop()
    with tempfile.TemporaryDirectory() as directory:
        for digest in digests:
            write_peft(adapters, digest, Path(directory) / digest)
        yield from compared(bench, plan, Path(directory), expected, own)


def _loramux(
    bench: Bench,
    plan: Plan,
    adapters: RandomAdapters,
    digests: list[str],
    expected: dict[str, list[Answer]],
    own: dict[str, Times],
) -> Iterator[Row]:
    """Measure loramux, and add its answers and times by kind."""
    model, pool_bytes = model_of(bench), pool_bytes_of(bench, plan)
    with open_engine(bench, model, adapters, pool_bytes=pool_bytes, **settings_of(bench, plan)) as engine:
        engine.load(digests)
        for kind in KINDS:
            used = digests if kind == ADAPTERS else []
            expected[kind] = answers_of(engine, model, plan, used)
            if bench.is_timed:
                own[kind] = _measure(bench, engine, model, plan, used)
                yield from _rows(plan, "loramux", kind, own, own)


def warm(bench: Bench, shard: int, num_shards: int) -> None:
    if shard == 0:
        gpu_check.warm(bench)
    plan = plan_of(bench)
    decode = [WarmStep(plan.decode.batch, 1, rank) for rank in (0, RANK)]
    prefill = [WarmStep(plan.prefill.num_prompts, plan.prefill.num_tokens, rank) for rank in (0, RANK)]
    steps = [*decode, *prefill][num_shards - 1 - shard :: num_shards]
    warm_steps(bench, model_of(bench), ALL_MODULES, steps, **settings_of(bench, plan))


def settings_of(bench: Bench, plan: Plan) -> dict[str, Any]:
    return gpu_step.settings_of(bench, [plan.decode]) | {"max_resident_adapters": plan.num_adapters}


def pool_bytes_of(bench: Bench, plan: Plan) -> int:
    adapters = RandomAdapters(bench, model_of(bench), engine_dtype(bench))
    adapter_pages = adapters.layout(RANK).num_pages
    return gpu_step.num_pages_of(settings_of(bench, plan), adapter_pages) * adapters.page_bytes


def answers_of(engine: ObservedEngine, model: Model, plan: Plan, digests: Sequence[str]) -> list[Answer]:
    """Answers to the checked prompts, in their order."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, num_logprobs=2)
    found = engine.answer(greedy_adds(checked_prompts(model, plan), NUM_CHECKED, digests, sampling))
    return [found[str(place)] for place in range(plan.num_adapters)]


def checked_prompts(model: Model, plan: Plan) -> list[tuple[int, ...]]:
    return [random_prompt(model, CHECKED_PROMPT, 100 + place) for place in range(plan.num_adapters)]


def prefill_prompts(model: Model, plan: Plan) -> list[tuple[int, ...]]:
    return [random_prompt(model, plan.prefill.num_tokens, place) for place in range(plan.prefill.num_prompts)]


def _measure(bench: Bench, engine: ObservedEngine, model: Model, plan: Plan, digests: list[str]) -> Times:
    prompts, seconds = prefill_prompts(model, plan), []
    num_prefills = 1 if bench.is_tiny else NUM_PREFILLS
    for _ in range(NUM_WARM_PREFILLS + num_prefills):
        bench.synchronize()
        started = time.perf_counter()
        engine.answer(greedy_adds(prompts, 1, digests))
        seconds.append(time.perf_counter() - started)
    step = gpu_step.measure(bench, engine, plan.decode, digests)
    return Times(step.wall_s, sorted(seconds[NUM_WARM_PREFILLS:])[num_prefills // 2])


def _rows(
    plan: Plan, system: str, kind: str, found: dict[str, Times], own: dict[str, Times], setting: str = ""
) -> Iterator[Row]:
    """The rows of one system. `over_loramux` is its time divided by loramux's with the same adapters."""
    way = f"{system}{setting}, " + (f"{plan.num_adapters} adapters, rank {RANK}" if kind == ADAPTERS else gpu_step.BASE)
    times, base = found[kind], found.get(BASE)
    cases = (
        (str(plan.decode), times.step_s, base and base.step_s, own[kind].step_s, plan.decode.batch),
        (str(plan.prefill), times.prefill_s, base and base.prefill_s, own[kind].prefill_s, plan.prefill.num_rows),
    )
    for case, seconds, base_s, own_s, num_tokens in cases:
        figures = {"wall_ms": seconds * 1e3, "tokens_s": num_tokens / seconds, "over_loramux": seconds / own_s}
        if kind == ADAPTERS and base_s:
            figures["over_base"] = seconds / base_s
        yield Row(case, way, figures)


def compared(
    bench: Bench, plan: Plan, directory: Path, expected: dict[str, list[Answer]], own: dict[str, Times]
) -> Iterator[Row]:
    for setting, limit_s in VLLM_PROCESSES.items():
        has_lora = setting == "with LoRA"
        where = f"{plan.decode}, {plan.prefill}"
        if not (bench.peers / "vllm").is_dir():
            yield Row(where, "vLLM", problem=f"{bench.peers} has no vLLM: see benchmarks/gpu/vllm_parts.py")
            return
        if bench.seconds_left < 30:
            yield Row(where, f"vLLM {setting}", problem="no time is left")
            continue
        figures, problem = run_child(bench, plan, directory, has_lora, min(limit_s, bench.seconds_left))
        way = f"vLLM {figures.version} {setting}".replace("  ", " ")
        try:
            checked = [_check(bench, kind, expected[kind], answers) for kind, answers in figures.answers.items()]
        except CheckError as error:
            yield Row(where, way, problem=f"other answers than loramux: {error}")
            continue
        yield from (Row(where, f"{way}, {kind}", found) for kind, found in zip(figures.answers, checked, strict=True))
        found = {
            kind: Times(figures.step_s[kind], figures.prefill_s[kind]) for kind in KINDS if kind in figures.prefill_s
        }
        if bench.is_timed:
            for kind in found:
                yield from _rows(plan, f"vLLM {figures.version}", kind, found, own, f" {setting}")
        if problem:
            yield Row(where, way, problem=problem)


def _check(bench: Bench, kind: str, expected: list[Answer], answers: list[list[PeerToken]]) -> dict[str, float]:
    """Compare vLLM's answers with loramux's. Raises CheckError if they differ by more than rounding."""
    peer = {
        str(place): Answer(
            [one.token_id for one in answer], [TokenLogprobs(one.token_id, one.logprob, one.top) for one in answer]
        )
        for place, answer in enumerate(answers)
    }
    own = {str(place): answer for place, answer in enumerate(expected)}
    worst, num_compared = compare(peer, own, TOLERANCES[engine_dtype(bench)])
    return {"error": worst, "compared_tokens": float(num_compared)}


def job_of(bench: Bench, plan: Plan, directory: Path, has_lora: bool) -> VllmJob:
    """The child's job. Writes the base's configuration to `directory`, which contains the adapters."""
    model, dtype = model_of(bench), engine_dtype(bench)
    settings = settings_of(bench, plan)
    max_len = settings["max_len"]
    base = directory / "base"
    base.mkdir(exist_ok=True)
    (base / "config.json").write_text(json.dumps(llama_config(model, max_len, DTYPES[dtype])))
    num_steps = gpu_step.TINY_MEASURED if bench.is_tiny else gpu_step.NUM_MEASURED
    # The timed steps are centred on the case's context.
    num_prompt = max(1, plan.decode.context - NUM_STAGGERED // 2 - NUM_WARM_STEPS - num_steps // 2)
    cache_tokens = (plan.decode.batch + 1) * (max_len + gpu_step.PAGE_TOKENS)
    return VllmJob(
        model_dir=str(base),
        dtype=dtype,
        device=bench.device.type,
        out=str(directory / f"figures-{'lora' if has_lora else 'plain'}.json"),
        shapes={name: list(shape) for name, shape in weight_shapes(model_config(model, max_len)).items()},
        adapters=[str(directory / f"a{place}") for place in range(plan.num_adapters)] if has_lora else [],
        rank=RANK,
        max_len=max_len,
        max_batch_tokens=VLLM_BATCH_TOKENS,
        cache_bytes=cache_tokens * model.kv_bytes(torch.empty(0, dtype=DTYPES[dtype]).element_size()),
        checked=checked_prompts(model, plan),
        num_checked=NUM_CHECKED,
        decode=[random_prompt(model, num_prompt, 1000 + place) for place in range(plan.decode.batch)],
        num_steps=num_steps,
        prefill=prefill_prompts(model, plan),
        num_prefills=1 if bench.is_tiny else NUM_PREFILLS,
        num_warm_prefills=NUM_WARM_PREFILLS,
    )


def run_child(bench: Bench, plan: Plan, directory: Path, has_lora: bool, limit_s: float) -> tuple[VllmFigures, str]:
    """Run vLLM in a process of its own. Return its figures, and why some are missing or an empty string."""
    job = job_of(bench, plan, directory, has_lora)
    file, log = directory / "job.json", directory / "vllm.log"
    file.write_text(json.dumps(asdict(job)))
    # The child sees only its own modules of this checkout, whose other folders have names of packages.
    own = directory / "own" / "benchmarks" / "gpu"
    own.mkdir(parents=True, exist_ok=True)
    for name in CHILD_FILES:
        shutil.copy(Path(__file__).with_name(name), own / name)
    paths = (str(bench.peers.resolve()), str(directory / "own"), os.environ.get("PYTHONPATH", ""))
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "VLLM_CACHE_ROOT": str(directory / "cache")}
    command = [sys.executable, "-m", "benchmarks.gpu.vllm_child", str(file)]
    started = time.monotonic()
    with log.open("w") as output:
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | VLLM_SETTINGS | variables,
            cwd=directory,
            start_new_session=True,
        )
        try:
            status = child.wait(limit_s)
            problem = "" if status == 0 else f"vLLM ended with {status}: {_last_line(log)}"
        except subprocess.TimeoutExpired:
            problem = f"vLLM was stopped after {limit_s:.0f} s"
        finally:
            _end(child)
    bench.say(f"  vLLM {'with' if has_lora else 'without'} LoRA: {time.monotonic() - started:.0f} s {problem}")
    return VllmFigures.read(Path(job.out)), problem


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the process with its own children, which would keep the card's memory."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no message"
