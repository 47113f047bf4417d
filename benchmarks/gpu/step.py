"""Measures whole decode steps of the engine, with the base only and with many adapters in one batch."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.answers import TOLERANCE, CheckError
from benchmarks.gpu import check as gpu_check
from benchmarks.gpu.bench import POOL_STD, Bench, Goal, Row
from benchmarks.gpu.engine import ObservedEngine, device_backend, engine_dtype, open_engine
from benchmarks.gpu.model import Model, model_of
from benchmarks.gpu.random_models import ALL_MODULES, RandomAdapters, random_prompt
from benchmarks.gpu.warm import WarmStep, warm_steps
from benchmarks.running_engine import greedy_adds
from loramux.engine.execution.graph_executor import STEPS_BEFORE_CAPTURE
from loramux.engine.protocol.messages import SamplingParams

RANK = 16
PAGE_TOKENS = 16
BATCH_TOKENS = 2048
"""Maximum number of tokens in a step. Servers often use this setting to limit the memory for activations."""

NUM_WARM, NUM_MEASURED = STEPS_BEFORE_CAPTURE + 4, 40
TINY_WARM, TINY_MEASURED = 1, 2
"""Numbers of untimed and timed steps. In the untimed steps, the shape's kernels are compiled and its graph captured."""

BASE = "base only"


@dataclass(frozen=True, slots=True)
class StepCase:
    """`batch` sequences that decode at a context of about `context` tokens."""

    batch: int
    context: int

    @property
    def num_skipped(self) -> int:
        """Maximum number of steps until all prompts are computed, while sequences with finished prompts decode."""
        return -(-self.batch * self.context // (BATCH_TOKENS - self.batch)) + 1

    def __str__(self) -> str:
        return f"decode b={self.batch} ctx={self.context}"


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of steady decode steps. `step_s` is the median time between a step's events, and `wall_s` is the mean
    wall-clock time. `idle` is the share of the device's time between steps. `host_waits` is the share of wall-clock
    time that the host waits for tokens. `idle` is meaningful only if `host_waits` is above 0: the host is then ahead of
    the device.
    """

    step_s: float
    wall_s: float
    idle: float
    host_waits: float
    mean_context: float


OVER_BASE = {False: {16: 1.15}, True: {16: 1.10, 64: 1.25}}
"""Goals for `over_base` at 64 rows and context 1,024 by number of adapters, without and with `fuses`."""


def cases(bench: Bench) -> list[StepCase]:
    """The cases to measure. Only the first has a goal for `over_base`."""
    if bench.is_tiny:
        return [StepCase(2, 20)]
    if bench.is_quick:
        return [StepCase(64, 1024), StepCase(1, 1024)]
    pairs = [(64, 1024), (16, 1024), (1, 1024), (256, 1024), (64, 512), (16, 512), (1, 512), (256, 512)]
    return [StepCase(*pair) for pair in pairs]


def adapter_counts(bench: Bench, case: StepCase) -> list[int]:
    """Numbers of distinct adapters to measure a case with. The goal for `over_base` applies to the first number."""
    counts = (2,) if bench.is_tiny else (16,) if bench.is_quick else (16, 64, 1)
    return [count for count in counts if count <= case.batch] or [case.batch]


def run(bench: Bench) -> Iterator[Row]:
    yield gpu_check.require_right_engine(bench)
    if bench.is_tiny and not bench.is_timed:
        return
    yield from run_cases(bench, cases(bench), pdl=True)
    if bench.has_pdl and bench.is_timed and bench.seconds_left > 0:
        yield from run_cases(bench, cases(bench)[:1], pdl=False)


def warm(bench: Bench, shard: int, num_shards: int) -> None:
    """Compile a share of the steps. The last process gets the first share, because the first process compiles the
    check's kernels.
    """
    if shard == 0:
        gpu_check.warm(bench)
    # Cases that differ only in context share their kernels.
    steps = list(dict.fromkeys(WarmStep(case.batch, 1, rank) for case in cases(bench) for rank in (0, RANK)))
    own = steps[num_shards - 1 - shard :: num_shards]
    settings = settings_of(bench, cases(bench))
    warm_steps(bench, model_of(bench), ALL_MODULES, own, **settings)
    if bench.has_pdl:
        first = [WarmStep(cases(bench)[0].batch, 1, RANK)]
        warm_steps(bench, model_of(bench), ALL_MODULES, first if shard == num_shards - 1 else [], pdl=False, **settings)


def settings_of(bench: Bench, wanted: list[StepCase]) -> dict[str, Any]:
    num_tokens = max(case.context + case.num_skipped for case in wanted) + PAGE_TOKENS + NUM_WARM + NUM_MEASURED
    return {
        "max_len": num_tokens,
        "max_batch_tokens": BATCH_TOKENS,
        "max_sequences": max(case.batch for case in wanted),
        "max_resident_adapters": max(max(adapter_counts(bench, case)) for case in wanted),
    }


def num_pages_of(settings: dict[str, Any], adapter_pages: int) -> int:
    """Number of pages in the engine's pool: enough for full sequences and all adapters, plus one."""
    pages_each = -(-settings["max_len"] // PAGE_TOKENS)
    return int(settings["max_sequences"] * pages_each + settings["max_resident_adapters"] * adapter_pages + 1)


def run_cases(bench: Bench, wanted: list[StepCase], pdl: bool, fuses: bool = False) -> Iterator[Row]:
    model = model_of(bench)
    settings = settings_of(bench, wanted)
    adapters = RandomAdapters(bench, model, engine_dtype(bench))
    digests = adapters.make([f"a{index}" for index in range(settings["max_resident_adapters"])], RANK)
    num_pages = num_pages_of(settings, adapters.num_pages(digests[0]))
    pool_bytes, backend = num_pages * adapters.page_bytes, device_backend(bench, pdl, fuses)
    with open_engine(bench, model, adapters, backend, pool_bytes=pool_bytes, **settings) as engine:
        # Prompts are not computed, so fill the pool with random keys and values.
        for part in engine.assembled.views.kv.view(-1).split(1 << 29):
            part.normal_(0.0, POOL_STD)
        engine.load(digests)
        if pdl:
            yield _check_full_size(model, engine, digests)
        if not bench.is_timed:
            return
        yield from bench.each(wanted, "engine", lambda case: _run_case(bench, model, engine, case, digests, pdl, fuses))


def _run_case(
    bench: Bench,
    model: Model,
    engine: ObservedEngine,
    case: StepCase,
    digests: list[str],
    pdl: bool,
    fuses: bool,
) -> Iterator[Row]:
    assert bench.ceilings is not None
    itemsize = engine.assembled.views.kv.element_size()
    base = 0.0
    for count in (0, *adapter_counts(bench, case)):
        measured = measure(bench, engine, case, digests[:count])
        num_bytes = model.weight_bytes(itemsize) + case.batch * measured.mean_context * model.kv_bytes(itemsize)
        num_bytes += count * model.adapter_bytes(RANK, itemsize)
        floor = num_bytes / bench.ceilings.bandwidth
        figures = {
            "step_ms": measured.step_s * 1e3,
            "wall_ms": measured.wall_s * 1e3,
            "tokens_s": case.batch / measured.wall_s,
            "floor_ms": floor * 1e3,
            "over_floor": measured.step_s / floor,
            "idle": measured.idle,
            "host_waits": measured.host_waits,
            "context": measured.mean_context,
        }
        goals = [Goal("idle", 0.05)]
        if count:
            figures["over_base"] = measured.wall_s / base
        else:
            base = measured.wall_s
            goals.append(Goal("over_floor", 1.25))
        if (case.batch, case.context) == (64, 1024) and count in OVER_BASE[fuses]:
            goals.append(Goal("over_base", OVER_BASE[fuses][count]))
        way = (f"{count} adapters, rank {RANK}" if count else BASE) + ("" if pdl else ", no pdl")
        way += ", fused" if fuses and count else ""
        bench.say(f"  {case}: {way} {measured.wall_s * 1e3:.2f} ms")
        yield Row(str(case), way, figures, tuple(goals))


def measure(bench: Bench, engine: ObservedEngine, case: StepCase, digests: list[str]) -> Measured:
    """Measure steady decode steps. The sequences use these adapters in turn, or the base if there are none."""
    num_measured = TINY_MEASURED if bench.is_tiny else NUM_MEASURED
    start_decoding(bench, engine, case, digests)
    observed = engine.observed
    observed.clear()
    started = time.perf_counter()
    for _ in range(num_measured):
        # This empties the outbox, as the engine process does after each step.
        engine.step()
    wall_s = time.perf_counter() - started
    waited_s, steps = observed.waited_s, observed.steps
    engine.abort()
    bench.synchronize()
    if any(step.num_tokens != case.batch for step in steps) or len(steps) != num_measured:
        raise CheckError(f"{case}: some measured steps are not decodes of {case.batch} rows")
    spans = [step.seconds for step in steps]
    whole = steps[0].begin.elapsed_time(steps[-1].end) / 1e3
    return Measured(
        step_s=statistics.median(spans),
        wall_s=wall_s / num_measured,
        idle=1.0 - sum(spans) / whole,
        host_waits=waited_s / wall_s,
        mean_context=statistics.mean(step.num_context for step in steps) / case.batch,
    )


def start_decoding(bench: Bench, engine: ObservedEngine, case: StepCase, digests: list[str]) -> None:
    """Let the case's sequences decode, and run the untimed steps. The sequences use these adapters in turn."""
    num_warm, num_measured = (TINY_WARM, TINY_MEASURED) if bench.is_tiny else (NUM_WARM, NUM_MEASURED)
    # Centre the measured steps, and the sequences' lengths, on the case's context.
    num_prompt = case.context - num_warm - num_measured // 2 - case.num_skipped // 2
    # Drop sequences that a failed case may have left behind.
    engine.abort()
    # Reload evicted adapters now, outside the timed section.
    engine.load(digests)
    num_tokens = case.num_skipped + num_warm + num_measured + 4
    for add in greedy_adds([(0,) * num_prompt] * case.batch, num_tokens, digests):
        engine.add(add)
    observed = engine.observed
    observed.skips, observed.num_decoding = True, 0
    for _ in range(case.num_skipped + 2):
        if observed.num_decoding == case.batch:
            break
        engine.step()
    observed.skips = False
    for _ in range(num_warm):
        engine.step()


def _check_full_size(model: Model, engine: ObservedEngine, digests: list[str]) -> Row:
    """Check that the timed model's answers to four prompts are finite, and that adapters change each of them.

    Whether answers depend on the batch is checked only on the small model in float32. Loading the timed model in
    float32 would take as long as measuring the steps, and bfloat16 rounding depends on the batch.
    """
    prompts = [random_prompt(model, 24, seed) for seed in range(4)]
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, num_logprobs=0)
    answers = [engine.answer(greedy_adds(prompts, 2, used, sampling)) for used in (None, digests)]
    plain, adapted = answers
    change = min(gpu_check.changed_by(adapted[name], plain[name]) for name in plain)
    if change <= TOLERANCE:
        raise CheckError(f"an adapter changed its row's log-probabilities by only {change:.2e}")
    case = f"{len(prompts)} prompts of the timed model, {model.num_layers} layers"
    return Row(case, "adapters against base", {"least_change": change} if math.isfinite(change) else {})
