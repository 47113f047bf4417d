"""Compiles the kernels that an engine will launch, using little memory."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.engine import device_backend, engine_dtype, open_engine
from benchmarks.gpu.model import Model
from benchmarks.gpu.random_models import RandomAdapters
from benchmarks.running_engine import GREEDY
from loramux.engine.device.backend import DenseLinear
from loramux.engine.loop.loaded_base import DTYPES
from loramux.engine.protocol.messages import Add
from loramux.engine.sequences.batch import Batch, ScheduledSequence, build_batch
from loramux.engine.sequences.sequence import PageTable, Sequence, block_list


@dataclass(frozen=True, slots=True)
class ZeroWeights:
    """Zero weights, for engines whose answers do not matter."""

    device: torch.device
    dtype: torch.dtype

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


class SharedLinears:
    """One weight shared by all linear layers of the same size. This is enough to compile an engine's kernels."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, ...], DenseLinear] = {}

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> DenseLinear:
        return self._made.setdefault(tuple(weight.shape), DenseLinear(weight, bias))


@dataclass(frozen=True, slots=True)
class WarmStep:
    """A step to compile: sequences of `num_rows` rows each, with an adapter of `rank`, or without one for rank 0."""

    num_sequences: int
    num_rows: int
    rank: int = 0


def warm_steps(
    bench: Bench,
    model: Model,
    modules: tuple[int, ...],
    steps: list[WarmStep],
    pdl: bool = True,
    fuses: bool = False,
    **settings: Any,
) -> None:
    """Run each step on an engine with a small pool, once on one adapter slot and once on all slots. All sequences of a
    step share the same pages.
    """
    if not steps:
        return
    dtype = engine_dtype(bench)
    adapters = RandomAdapters(bench, model, dtype, settings.get("adapter_dtype"))
    ranks = sorted({step.rank for step in steps if step.rank})
    for rank in ranks:
        adapters.make([f"r{rank}"], rank, modules)
    num_pages = 1 + sum(adapters.num_pages(f"r{rank}") for rank in ranks)
    backend = dataclasses.replace(device_backend(bench, pdl, fuses), make_linear=SharedLinears())
    weights = ZeroWeights(bench.device, DTYPES[dtype])
    pool_bytes = num_pages * adapters.page_bytes
    with open_engine(bench, model, adapters, backend, weights, pool_bytes=pool_bytes, **settings) as engine:
        engine.load(f"r{rank}" for rank in ranks)
        resident = {one.digest: one.slot for one in engine.stats().adapters}
        # Unused slots have rank 0 and launch the same kernels.
        unused = [slot for slot in range(settings["max_resident_adapters"]) if slot not in resident.values()]
        for step in steps:
            slots = [resident[f"r{step.rank}"], *unused] if step.rank else [-1]
            # Few and many rows per adapter use different kernels.
            for used in (slots[:1], slots):
                engine.observed.executor.submit(_batch_of(step, used)).choose().tokens()


def _batch_of(step: WarmStep, slots: list[int]) -> Batch:
    """The step's batch, with its sequences spread over these slots."""
    add = Add(sequence_id="", prompt=(0,) * step.num_rows, max_tokens=1, sampling=GREEDY)
    tables = [PageTable(block_list([0] * -(-step.num_rows // 16)))]
    sequences = [
        Sequence(add=add, owner=b"", arrival=0, seed=0, slot=slots[i % len(slots)], tables=tables)
        for i in range(step.num_sequences)
    ]
    return build_batch([ScheduledSequence(one, step.num_rows) for one in sequences], 16)
