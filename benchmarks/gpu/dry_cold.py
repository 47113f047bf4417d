"""Computes the memory and time that `cold` needs, from the engine's own steps and the sizes of its adapters' files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu import cold as gpu_cold
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.dry_engine import PlannedEngine
from benchmarks.gpu.model import model_of
from benchmarks.gpu.needs import FILE_RATE, HOST_OP_S, HOST_STEP_S, Need, check, random_s
from benchmarks.gpu.random_models import ALL_MODULES, RandomAdapters
from benchmarks.gpu.table_step import TableCase
from benchmarks.tenants.cold_storm import WAYS

STORM_WINDOW_S = 2.0
"""Assumed seconds of each of the storm's windows, in addition to its length, until all adapters are loaded."""


def cold(bench: Bench) -> Iterator[Need]:
    model, wanted = model_of(bench), gpu_cold.cold_of(bench)
    adapters = RandomAdapters(bench, model, "bfloat16")
    yield check()
    for rank in wanted.ranks:
        pages = adapters.layout(rank).num_pages
        engine = PlannedEngine(bench, model, gpu_cold.settings_of(wanted), gpu_cold.pages_of(wanted, pages))
        counts = (0, 1)
        steps = [
            engine.record(TableCase(f"rank {rank}", 1, 0, wanted.num_prompt, count, ALL_MODULES if count else (), rank))
            for count in counts
        ]
        num_adapters = 1 + wanted.num_timed
        num_bytes = pages * adapters.page_bytes
        # Each adapter is written once and loaded from three tiers.
        files_s = num_adapters * (1 + len(gpu_cold.COUNTED)) * num_bytes / FILE_RATE
        num_steps = num_adapters * (1 + len(gpu_cold.COUNTED) + wanted.num_warm)
        step_s = max(max(one.seconds(bench), HOST_OP_S * one.num_launches) for one in steps) + HOST_STEP_S
        yield Need(
            f"rank {rank}: {', '.join(gpu_cold.COUNTED)}",
            steps[-1].shapes | {"files": f"{num_adapters} of {num_bytes / 1e6:.0f} MB"},
            len(gpu_cold.COUNTED),
            engine.held | {"activations": max(one.activations for one in steps)},
            engine.start_s + random_s(bench, num_bytes) + files_s + num_steps * step_s,
            frozenset[str]().union(*(one.programs for one in steps)),
            num_launches=sum(one.num_launches for one in steps),
        )
    yield from _storm(bench)
    yield engine.compiling()


def _storm(bench: Bench) -> Iterator[Need]:
    model, adapters = model_of(bench), RandomAdapters(bench, model_of(bench), "bfloat16")
    measurement = gpu_cold.storm_of(bench, gpu_cold.files_of(bench, Path(), ()))
    arguments, rank = measurement.arguments, gpu_cold.STORM_RANK
    pages = adapters.layout(rank).num_pages
    num_bytes = pages * adapters.page_bytes
    engine = PlannedEngine(bench, model, gpu_cold.storm_settings(measurement), gpu_cold.storm_pages(measurement, pages))
    longest = arguments.input.end + arguments.output.end
    decode = TableCase("storm", arguments.residents, longest - 1, 1, arguments.resident_adapters, ALL_MODULES, rank)
    step = engine.record(decode)
    num_files = arguments.pool_adapters + gpu_cold.num_fresh(measurement)
    num_windows = len(WAYS) * (gpu_cold.UNTIMED_ROUNDS + arguments.repeats)
    yield Need(
        f"storm of {arguments.loads} adapters, {arguments.residents} streams",
        step.shapes | {"files": f"{num_files} of {num_bytes / 1e6:.0f} MB"},
        len(WAYS),
        engine.held | {"activations": step.activations},
        engine.start_s
        + num_files * num_bytes / FILE_RATE
        + num_windows * (arguments.seconds + arguments.settle + STORM_WINDOW_S),
        frozenset(step.programs),
        num_launches=step.num_launches,
    )
