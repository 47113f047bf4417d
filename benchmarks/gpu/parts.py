"""The parts of the GPU benchmark: how each is run, compiled and planned, and how long it may take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.gpu import attention as gpu_attention
from benchmarks.gpu import ceilings as gpu_ceilings
from benchmarks.gpu import codes as gpu_codes
from benchmarks.gpu import dry_engine as gpu_dry_engine
from benchmarks.gpu import dry_kernels as gpu_dry_kernels
from benchmarks.gpu import dry_peer as gpu_dry_peer
from benchmarks.gpu import fused as gpu_fused
from benchmarks.gpu import lora as gpu_lora
from benchmarks.gpu import peer as gpu_peer
from benchmarks.gpu import prefill as gpu_prefill
from benchmarks.gpu import s_lora as gpu_s_lora
from benchmarks.gpu import s_lora_fp8 as gpu_s_lora_fp8
from benchmarks.gpu import step as gpu_step
from benchmarks.gpu.bench import Bench, Row
from benchmarks.gpu.model import Model, model_of
from benchmarks.gpu.needs import Need


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the benchmark. `run` checks `bench.seconds_left` between cases and reports the cases that it skips.

    `needs` lists the memory and time that its cases need, for a dry run. `warm(bench, shard, num_shards)` compiles a
    share of the kernels that `run` launches, in a separate process. With `is_apart`, the part runs only if it is named,
    because it would take most of the time of all parts.
    """

    name: str
    budget_s: float
    run: Callable[[Bench], Iterator[Row]]
    needs: Callable[[Bench], Iterator[Need]]
    warm: Callable[[Bench, int, int], None] | None = None
    model: Callable[[Bench], Model] = model_of
    is_apart: bool = False


def _cold(bench: Bench) -> Iterator[Row]:
    # This part needs packages that the others do without.
    from benchmarks.gpu import cold

    yield from cold.run(bench)


def _cold_needs(bench: Bench) -> Iterator[Need]:
    from benchmarks.gpu import dry_cold

    yield from dry_cold.cold(bench)


def _warm_cold(bench: Bench, shard: int, num_shards: int) -> None:
    from benchmarks.gpu import cold

    cold.warm(bench, shard, num_shards)


PARTS = (
    # This part always runs, because the others need the ceilings to compute their floors.
    Part("ceilings", 15, gpu_ceilings.run, gpu_dry_kernels.ceilings),
    Part("lora", 55, gpu_lora.run, gpu_dry_kernels.lora, gpu_lora.warm),
    Part("step", 70, gpu_step.run, gpu_dry_engine.step, gpu_step.warm),
    Part("fused", 40, gpu_fused.run, gpu_dry_engine.fused, gpu_fused.warm),
    Part("s_lora", 215, gpu_s_lora.run, gpu_dry_engine.s_lora, gpu_s_lora.warm, gpu_s_lora.model_of),
    Part("prefill", 40, gpu_prefill.run, gpu_dry_engine.prefill, gpu_prefill.warm),
    Part("attention", 40, gpu_attention.run, gpu_dry_kernels.attention, gpu_attention.warm),
    Part("codes", 35, gpu_codes.run, gpu_dry_kernels.codes, gpu_codes.warm),
    Part(
        "s_lora_fp8",
        110,
        gpu_s_lora_fp8.run,
        gpu_dry_engine.s_lora_fp8,
        gpu_s_lora_fp8.warm,
        gpu_s_lora.model_of,
        is_apart=True,
    ),
    Part("cold", 300, _cold, _cold_needs, _warm_cold, is_apart=True),
    Part("peer", 420, gpu_peer.run, gpu_dry_peer.peer, gpu_peer.warm, is_apart=True),
)
