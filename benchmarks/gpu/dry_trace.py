"""Computes the memory and time that `kernel_times` needs on a card, from the engine's own steps over meta tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import prefill as gpu_prefill
from benchmarks.gpu import step as gpu_step
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cards import PlannedCard
from benchmarks.gpu.dry_engine import PlannedStep
from benchmarks.gpu.dry_run import why_not
from benchmarks.gpu.kernel_times import (
    NUM_TRACED,
    PREFILL_COUNTS,
    Contexts,
    Traced,
    decode_settings,
    prefill_pages,
    prefill_settings,
    prefill_warm_runs,
)
from benchmarks.gpu.model import Model
from benchmarks.gpu.needs import COMPILE_S, ENGINE_S, HOST_OP_S, HOST_STEP_S, MetaMemory, Need, planned, random_s
from benchmarks.gpu.plan import MAX_MINUTES
from benchmarks.gpu.random_models import RandomAdapters
from benchmarks.gpu.table_step import META, MetaEngine, TableCase

PROFILED = 10
"""Assumed ratio of the time to run a step under the profiler and to read its trace, to the time of the step."""


class WholeEngine:
    """An engine over meta tensors with all of its layers, and the bytes that it would take on a card."""

    def __init__(self, bench: Bench, model: Model, settings: dict[str, Any], num_pages: int) -> None:
        self._bench, self._memory = bench, MetaMemory()
        with self._memory:
            self._engine = MetaEngine(model, planned(bench).card, num_pages=num_pages, **settings)
            pool_bytes = self._engine.pool.raw.nbytes
            self.held = {"pool": pool_bytes, "weights and tables": self._memory.restart() - pool_bytes}
        self.start_s = ENGINE_S + random_s(bench, self.held["weights and tables"])

    def need(self, name: str, cases: Sequence[TableCase], num_run: int, other_s: float, operations: float = 0) -> Need:
        """The need of `num_run` steps of each case. `other_s` is the time of everything else."""
        steps = []
        for case in cases:
            step = PlannedStep(case.num_tokens)
            with self._memory:
                before = self._memory.restart()
                self._engine.record(case, step.note_step)
            step.activations = self._memory.peak - before
            steps.append(step)
        seconds = other_s
        for step in steps:
            run = max(step.seconds(self._bench, operations), HOST_OP_S * step.num_launches)
            seconds += num_run * (run + HOST_STEP_S)
        held = self.held | {"activations": max(step.activations for step in steps)}
        programs = frozenset[str]().union(*(step.programs for step in steps))
        num_launches = sum(step.num_launches for step in steps)
        return Need(name, steps[-1].shapes, len(steps), held, seconds, programs, num_launches=num_launches)


def needs_of(bench: Bench, traced: Traced, contexts: Contexts) -> Iterator[Need]:
    """One need for each decode and each prefill."""
    model, adapters = traced.model, RandomAdapters(bench, traced.model, "bfloat16")
    adapter_pages = adapters.layout(gpu_step.RANK, traced.modules).num_pages
    payload_s = random_s(bench, adapter_pages * adapters.page_bytes)

    def case_of(num_sequences: int, context: int, num_rows: int, count: int) -> TableCase:
        modules = traced.modules if count else ()
        return TableCase("", num_sequences, context, num_rows, count, modules, gpu_step.RANK, model.experts)

    for group in contexts.decodes:
        settings = decode_settings(bench, group)
        engine = WholeEngine(bench, model, settings, gpu_step.num_pages_of(settings, adapter_pages))
        other_s = engine.start_s + payload_s + random_s(bench, engine.held["pool"])
        for decode, counts in group:
            cases = [case_of(decode.batch, decode.context - 1, 1, count) for count in counts]
            skipped_s = len(counts) * decode.num_skipped * HOST_STEP_S
            num_run = gpu_step.NUM_WARM + PROFILED * NUM_TRACED
            yield engine.need(f"{decode}, adapters {counts}", cases, num_run, other_s + skipped_s)
            other_s = 0.0
    for prefill in contexts.prefills:
        settings = prefill_settings(prefill)
        engine = WholeEngine(bench, model, settings, prefill_pages(bench, model, prefill, adapter_pages))
        num_rows = settings["max_batch_tokens"]
        num_steps = prefill.num_tokens // num_rows
        cases = [case_of(1, prefill.num_tokens - num_rows, num_rows, count) for count in PREFILL_COUNTS]
        num_run = num_steps * (prefill_warm_runs(prefill) + PROFILED)
        operations = prefill.operations(model, gpu_prefill.RANK) / num_steps
        yield engine.need(
            f"{prefill}, adapters {PREFILL_COUNTS}", cases, num_run, engine.start_s + payload_s, operations
        )


def list_needs(traced: Traced, contexts: Contexts, card: PlannedCard) -> int:
    """Print what each trace needs on the card. Return 1 if the memory or MAX_MINUTES does not suffice."""
    bench = Bench(META, False, False, False, True, False, Path(), planned=card)
    needs = list(needs_of(bench, traced, contexts))
    # Programs are compiled one after another, at their first launch.
    num_programs = len(frozenset[str]().union(*(one.programs for one in needs)))
    seconds = sum(one.seconds for one in needs) + COMPILE_S * num_programs
    problems = [why_not(bench, one) for one in needs]
    for one, problem in zip(needs, problems, strict=True):
        held = ", ".join(f"{name} {num_bytes / 1e9:.1f}" for name, num_bytes in one.held.items())
        fits = f"does not fit: {problem}" if problem else f"fits in {card.memory_bytes / 1e9:.0f} GB"
        print(f"{one.case}: {one.num_bytes / 1e9:.1f} GB ({held}), {one.seconds:.0f} s, {fits}")
    print(f"{num_programs} programs, {seconds:.0f} of {60 * MAX_MINUTES} s")
    return 1 if any(problems) or seconds > 60 * MAX_MINUTES else 0
