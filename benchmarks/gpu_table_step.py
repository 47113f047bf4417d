"""One step of the engine over tensors without memory: every launch is recorded, and nothing is computed.

The executor, the decoder and the kernels' launchers are the engine's own, so that what is counted is what a GPU runs.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from benchmarks.gpu_cards import Card
from benchmarks.gpu_model import Model
from benchmarks.gpu_random import config_of
from loramux.adapter_store.packing import PackedAdapter
from loramux.engine.accelerator import HostAccelerator
from loramux.engine.backend import Backend, DenseLinear
from loramux.engine.batch import Batch, ScheduledSequence, build_batch
from loramux.engine.config import pack_target
from loramux.engine.device_sampler import DeviceSampler
from loramux.engine.graph_executor import GraphExecutor
from loramux.engine.messages import Add, SamplingParams
from loramux.engine.model import Decoder
from loramux.engine.model_config import ModelConfig
from loramux.engine.sequence import Sequence as EngineSequence
from loramux.engine.sequence import page_list
from loramux.engine.slot_tables import SlotTables
from loramux.engine.step_buffer import StepBuffer
from loramux.kernels.gpu import GpuKernels
from loramux.kernels.layout import adapter_layout
from loramux.kernels.sampling import sample_tokens
from loramux.kernels.tables import PoolViews

META = torch.device("meta")
PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TableCase:
    """Sequences of `num_queries` new tokens each behind `context` others, the first of them on `num_adapters`.

    Adapters take turns. `modules` are the indices of the linears that they change, with `rank` each.
    """

    name: str
    num_sequences: int
    context: int
    num_queries: int = 1
    num_adapters: int = 0
    modules: tuple[int, ...] = ()
    rank: int = 16

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.num_queries


@dataclass(frozen=True, slots=True, eq=False)
class TritonLaunch:
    """A kernel, its grid, its arguments by name and what the compiler made of it."""

    name: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    program: Any


@dataclass(frozen=True, slots=True, eq=False)
class TorchLaunch:
    """A torch operator that runs a kernel: `inputs` and `outputs` are the tensors that it reads and writes."""

    name: str
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedStep:
    """What a step launched, in order, and the batch that it ran."""

    case: TableCase
    batch: Batch
    launches: tuple[TritonLaunch | TorchLaunch, ...]


class UncomputingAccelerator(HostAccelerator):
    """A device whose tensors have shapes and no content."""

    device = META

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@dataclass(frozen=True, slots=True)
class MetaWeights:
    """Weights of the wanted shapes."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=META)


def record_step(model: Model, card: Card, case: TableCase) -> RecordedStep:
    """Run the case's step on `model` as `card` would, and note what it launches."""
    config = _config(model, case.context + case.num_queries)
    target = pack_target(config, "bfloat16")
    accelerator = UncomputingAccelerator()
    backend = Backend(accelerator, lambda pool, shapes: kernels, DenseLinear, None, sample_tokens)
    pages_each = -(-(case.context + case.num_queries) // PAGE_TOKENS)
    geometry = target.geometry
    sizes = (case.num_sequences * pages_each, geometry.num_layers, geometry.page_bytes)
    raw = torch.empty(sizes, dtype=torch.uint8, device=META)
    pool = PoolViews(raw, raw.view(torch.bfloat16), raw.view(torch.bfloat16), geometry)
    kernels = GpuKernels(pool, num_processors=card.multiprocessors)
    decoder = Decoder(config, MetaWeights(), torch.bfloat16, config.max_model_len, backend)
    tables = SlotTables(target, max(1, case.num_adapters), accelerator, decoder.outer_factors)
    ranks = np.zeros((geometry.num_layers, len(target.modules)), np.int32)
    ranks[:, list(case.modules)] = case.rank
    layout = adapter_layout(geometry, target.modules, ranks)
    packed = PackedAdapter("", layout, np.ones(ranks.shape, np.float32), np.zeros(0, np.uint8))
    for slot in range(case.num_adapters):
        tables.write(slot, [0] * layout.num_pages, packed)
    buffer = StepBuffer(accelerator, case.num_tokens, case.num_sequences, case.num_sequences * pages_each)
    sampler = DeviceSampler(accelerator, sample_tokens, case.num_sequences, ())
    executor = GraphExecutor(decoder, kernels, tables, accelerator, buffer, sampler, case.num_sequences)
    batch = _batch(case, pages_each)
    with recording(card.capability) as launches:
        executor.submit(batch)
    return RecordedStep(case, batch, tuple(launches))


def _config(model: Model, max_len: int) -> ModelConfig:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config_of(model, max_len)))
        return ModelConfig.load(Path(directory))


def _batch(case: TableCase, pages_each: int) -> Batch:
    scheduled = []
    for index in range(case.num_sequences):
        num_tokens = case.context + case.num_queries
        add = Add(
            sequence_id=str(index), prompt=(0,) * num_tokens, max_tokens=1, sampling=SamplingParams(temperature=0.0)
        )
        slot = index * case.num_adapters // case.num_sequences if case.num_adapters else -1
        pages = page_list(list(range(index * pages_each, (index + 1) * pages_each)))
        sequence = EngineSequence(
            add=add, owner=b"", arrival=index, seed=0, slot=slot, num_computed=case.context, pages=pages
        )
        scheduled.append(ScheduledSequence(sequence, case.num_queries))
    return build_batch(scheduled, PAGE_TOKENS)


@contextmanager
def recording(capability: int) -> Iterator[list[TritonLaunch | TorchLaunch]]:
    """Compile what is launched for `capability` instead of running it, and list it in order."""
    launches: list[TritonLaunch | TorchLaunch] = []
    run: Callable[..., Any] = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        program = run(self, *arguments, grid=grid, warmup=True, **options)
        named = {name: value for name, value in options.items() if name in self.arg_names}
        bound = dict(self.signature.bind(*arguments, **named).arguments)
        launches.append(TritonLaunch(self.fn.__name__, tuple(grid), bound, program))
        return program

    previous = driver._active
    driver.set_active(_NoDevice(GPUTarget("cuda", capability, 32)))
    JITFunction.run = compile_only
    try:
        with _TorchRecorder(launches):
            yield launches
    finally:
        JITFunction.run = run
        driver._active = previous


@dataclass(frozen=True, slots=True)
class _NoDevice:
    """What Triton asks of a driver before it compiles."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


_ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided")


class _TorchRecorder(TorchDispatchMode):
    """Notes the operators that run a kernel: all but views and allocations."""

    def __init__(self, launches: list[TritonLaunch | TorchLaunch]) -> None:
        super().__init__()
        self._launches = launches

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        returned = func._schema.returns
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in returned)
        name = str(func).split(".")[1]
        outputs = _tensors((result,))
        if not is_view and name not in _ALLOCATIONS and any(one.device == META for one in outputs):
            self._launches.append(TorchLaunch(name, _tensors((*args, *(kwargs or {}).values())), outputs))
        return result


def _tensors(values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return tuple(found)
