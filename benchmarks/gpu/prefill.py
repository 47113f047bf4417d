"""Measures prefill relative to the card's matrix rate, with one long prompt and with several prompts and adapters."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.answers import CheckError
from benchmarks.gpu import check as gpu_check
from benchmarks.gpu.bench import Bench, Goal, Row
from benchmarks.gpu.code_formats import FORMATS, FP8, FP8_INPUTS, SharedCodes
from benchmarks.gpu.engine import ObservedEngine, device_backend, engine_dtype, open_engine
from benchmarks.gpu.model import Model, model_of
from benchmarks.gpu.random_models import ALL_MODULES, RandomAdapters, random_prompt
from benchmarks.gpu.warm import WarmStep, warm_steps
from benchmarks.running_engine import greedy_adds
from loramux.engine.execution.graph_executor import STEPS_BEFORE_CAPTURE

RANK = 16
PAGE_TOKENS = 16
NUM_WARM, NUM_MEASURED = STEPS_BEFORE_CAPTURE + 1, 7
TINY_WARM, TINY_MEASURED = 0, 1
"""Numbers of untimed and timed runs. Small steps are captured as graphs in the untimed runs."""

Measured = dict[tuple[int, int, int], float]
"""Seconds of steps with weights in bfloat16, by their prompts, tokens per prompt and adapters."""


@dataclass(frozen=True, slots=True)
class PrefillCase:
    """Prompts of one length, computed in one step. `form` is the format of the weights, or empty for bfloat16."""

    num_prompts: int
    num_tokens: int
    form: str = ""

    @property
    def num_rows(self) -> int:
        return self.num_prompts * self.num_tokens

    def operations(self, model: Model, rank: int) -> int:
        """Number of multiplications and additions in linear layers, attention, adapters, and the head (last tokens)."""
        visible = self.num_tokens * (self.num_tokens + 1) // 2
        attention = 4 * model.num_heads * model.head_dim * visible * self.num_prompts
        adapters = model.adapter_bytes(rank, itemsize=1)
        head = 2 * self.num_prompts * model.vocab_size * model.hidden_size
        linears = 2 * self.num_rows * (model.num_layers * model.linear_elements + adapters)
        return linears + model.num_layers * attention + head

    def __str__(self) -> str:
        return f"prefill {self.num_prompts} x {self.num_tokens}" + (f", weights in {self.form}" if self.form else "")


def cases(bench: Bench) -> list[PrefillCase]:
    """The cases, with those of one format next to each other, because they share an engine. bfloat16 is the first."""
    if bench.is_tiny:
        return [PrefillCase(2, 3), PrefillCase(2, 3, FP8_INPUTS)]
    if bench.is_quick:
        return [PrefillCase(1, 2048)]
    plain = [PrefillCase(1, 512), PrefillCase(1, 2048), PrefillCase(1, 8192), PrefillCase(8, 1024)]
    return plain + [PrefillCase(1, 2048, form) for form in (FP8, FP8_INPUTS)]


def run(bench: Bench) -> Iterator[Row]:
    yield gpu_check.require_right_engine(bench)
    if not bench.is_timed:
        return
    measured: Measured = {}
    for form, wanted in by_form(cases(bench)):
        yield from _run_cases(bench, form, wanted, measured)


def _run_cases(bench: Bench, form: str, wanted: list[PrefillCase], measured: Measured) -> Iterator[Row]:
    """Measure cases with one format of weights on an engine of their own."""
    model = model_of(bench)
    adapters = RandomAdapters(bench, model, engine_dtype(bench))
    digests = adapters.make([f"a{index}" for index in range(max(case.num_prompts for case in wanted))], RANK)
    num_pages = num_pages_of(wanted, adapters.num_pages(digests[0]))
    pool_bytes = num_pages * adapters.page_bytes
    backend = device_backend(bench)
    if form:
        codes = SharedCodes(FORMATS[form], bench.device, (model.vocab_size,))
        backend = replace(backend, make_linear=codes.linear)
    with open_engine(bench, model, adapters, backend, pool_bytes=pool_bytes, **settings_of(wanted)) as engine:
        engine.load(digests)
        yield from bench.each(wanted, "engine", lambda case: _run_case(bench, model, engine, case, digests, measured))


def by_form(wanted: list[PrefillCase]) -> Iterator[tuple[str, list[PrefillCase]]]:
    for form, group in itertools.groupby(wanted, lambda case: case.form):
        yield form, list(group)


def warm(bench: Bench, shard: int, num_shards: int) -> None:
    """Compile a share of the steps. The second process gets the first share, because the first process compiles the
    check's kernels. A step has few kernels of quantised weights; they are compiled when they are measured.
    """
    plain = [case for case in cases(bench) if not case.form]
    steps = [WarmStep(case.num_prompts, case.num_tokens, rank) for case in plain for rank in (0, RANK)]
    own = steps[(shard - 1) % num_shards :: num_shards]
    warm_steps(bench, model_of(bench), ALL_MODULES, own, **settings_of(plain))


def settings_of(wanted: list[PrefillCase]) -> dict[str, Any]:
    return {
        "max_len": max(case.num_tokens for case in wanted) + 1,
        "max_batch_tokens": max(case.num_rows for case in wanted),
        "max_sequences": max(case.num_prompts for case in wanted),
        "max_resident_adapters": max(case.num_prompts for case in wanted),
    }


def num_pages_of(wanted: list[PrefillCase], adapter_pages: int) -> int:
    prompts = max(case.num_prompts * (case.num_tokens // PAGE_TOKENS + 2) for case in wanted)
    return prompts + max(case.num_prompts for case in wanted) * adapter_pages + 1


def _run_case(
    bench: Bench, model: Model, engine: ObservedEngine, case: PrefillCase, digests: list[str], measured: Measured
) -> Iterator[Row]:
    assert bench.ceilings is not None
    base = 0.0
    for count in (0, case.num_prompts):
        seconds = _measure(bench, model, engine, case, digests[:count])
        floor = case.operations(model, RANK if count else 0) / bench.ceilings.matmul
        figures = {
            "time_ms": seconds * 1e3,
            "tokens_s": case.num_rows / seconds,
            "tflop_s": floor * bench.ceilings.matmul / seconds / 1e12,
            "floor_ms": floor * 1e3,
            "over_floor": seconds / floor,
        }
        if count:
            figures["over_base"] = seconds / base
        else:
            base = seconds
        same = case.num_prompts, case.num_tokens, count
        goals: tuple[Goal, ...] = ()
        if not case.form:
            measured[same] = seconds
        elif same in measured:
            figures["over_bfloat16"] = seconds / measured[same]
            goals = (Goal("over_bfloat16", 1.0),) if case.form == FP8_INPUTS else ()
        way = f"{count} adapters, rank {RANK}" if count else "base only"
        bench.say(f"  {case}: {way} {seconds * 1e3:.1f} ms")
        yield Row(str(case), way, figures, goals)


def _measure(bench: Bench, model: Model, engine: ObservedEngine, case: PrefillCase, digests: list[str]) -> float:
    """Median seconds of the step that computes the case's prompts and samples their next tokens."""
    num_warm, num_measured = (TINY_WARM, TINY_MEASURED) if bench.is_tiny else (NUM_WARM, NUM_MEASURED)
    seconds = []
    # Drop sequences that a failed case may have left behind.
    engine.abort()
    for number in range(num_warm + num_measured):
        # Reload evicted adapters now, outside the timed section.
        engine.load(digests)
        engine.observed.clear()
        prompts = (random_prompt(model, case.num_tokens, seed=row) for row in range(case.num_prompts))
        engine.answer(greedy_adds(prompts, 1, digests))
        bench.synchronize()
        steps = engine.observed.steps
        if [step.num_tokens for step in steps] != [case.num_rows]:
            raise CheckError(f"{case}: the prompts were not computed in one step")
        if number >= num_warm:
            seconds.append(steps[0].seconds)
    return statistics.median(seconds)
