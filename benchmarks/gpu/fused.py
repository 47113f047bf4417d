"""Measures decode steps whose linear layers and adapters are one product (`fused_lora`)."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu import check as gpu_check
from benchmarks.gpu import step as gpu_step
from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.model import model_of
from benchmarks.gpu.random_models import ALL_MODULES
from benchmarks.gpu.step import RANK, StepCase
from benchmarks.gpu.warm import WarmStep, warm_steps


def cases(bench: Bench) -> list[StepCase]:
    return gpu_step.cases(bench)[:1]


def run(bench: Bench) -> Iterator[Row]:
    yield gpu_check.checked_engine(bench, fuses=True)
    if bench.is_tiny and not bench.is_timed:
        return
    yield from gpu_step.run_cases(bench, cases(bench), pdl=True, fuses=True)


def warm(bench: Bench, shard: int, num_shards: int) -> None:
    if shard == 0:
        gpu_check.warm(bench, fuses=True)
    if shard == num_shards - 1:
        (case,) = cases(bench)
        steps = [WarmStep(case.batch, 1, rank) for rank in (0, RANK)]
        settings = gpu_step.settings_of(bench, [case])
        warm_steps(bench, model_of(bench), ALL_MODULES, steps, fuses=True, **settings)
