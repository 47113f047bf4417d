"""Runs one step of the engine over meta tensors: every launch is recorded, and nothing is computed.

The executor, the decoder and the kernels' launchers are the engine's own, so the counts match those on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed._functional_collectives  # registers the exchanges' shapes
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver
from triton.runtime.jit import compute_cache_key

from benchmarks.gpu.cards import Card
from benchmarks.gpu.code_formats import CodeFormat, SharedCodes
from benchmarks.gpu.model import Experts, Model
from benchmarks.gpu.random_models import model_config, ranks_of
from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.engine.adapters.slot_tables import SlotTables
from loramux.engine.decoder.decoder import Decoder
from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.device.backend import Backend, DenseLinear
from loramux.engine.execution.device_sampler import DeviceSampler
from loramux.engine.execution.graph_executor import GraphExecutor
from loramux.engine.execution.step_buffer import StepBuffer
from loramux.engine.loop.config import KvDtype, kv_itemsize, pack_target
from loramux.engine.pages.pool_memory import allocate_pool
from loramux.engine.parallel.sharding import check_sharding, worker_config
from loramux.engine.protocol.messages import Add, SamplingParams
from loramux.engine.sequences.batch import Batch, ScheduledSequence, build_batch
from loramux.engine.sequences.sequence import PageTable, block_list
from loramux.engine.sequences.sequence import Sequence as EngineSequence
from loramux.kernels.gpu.contiguous_attention import flash_attention
from loramux.kernels.gpu.kernels import GpuKernels
from loramux.kernels.gpu.lora.lora_linear import MAX_ROWS
from loramux.kernels.gpu.sampling import sample_tokens

META = torch.device("meta")
PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TableCase:
    """Sequences that each have `context` computed and `num_queries` new tokens, divided among `num_adapters` adapters.

    Consecutive sequences share an adapter. `modules` are the indices of the linear layers that each adapter changes
    with `rank`. `experts` describes the model's experts, if it has any. With `fuses`, linear layers and their adapters
    are multiplied together.
    """

    name: str
    num_sequences: int
    context: int
    num_queries: int = 1
    num_adapters: int = 0
    modules: tuple[int, ...] = ()
    rank: int = 16
    experts: Experts | None = None
    fuses: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.num_queries


@dataclass(frozen=True, slots=True, eq=False)
class TritonLaunch:
    """A kernel launch: the grid, the arguments by name, and the compiled program or an Uncompiled."""

    name: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    program: Any


@dataclass(frozen=True, slots=True)
class Uncompiled:
    """A program that Triton would compile. `hash` covers its source, specialization and target."""

    hash: str


@dataclass(frozen=True, slots=True, eq=False)
class TorchLaunch:
    """A torch operator that runs a kernel: `inputs` and `outputs` are the tensors that it reads and writes."""

    name: str
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]


Launch = TritonLaunch | TorchLaunch


@dataclass(frozen=True, slots=True, eq=False)
class RecordedStep:
    """A step's batch, and its launches in order."""

    case: TableCase
    batch: Batch
    launches: tuple[Launch, ...]

    @property
    def num_experts(self) -> int:
        assert self.case.experts is not None
        return self.case.experts.num_experts


class UncomputingAccelerator(HostAccelerator):
    """A device whose tensors have shapes but no data."""

    device = META

    def stage(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(META)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@dataclass(frozen=True, slots=True)
class MetaWeights:
    """Weights with shapes but no data."""

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=META)


@dataclass(frozen=True, slots=True)
class MetaGroup:
    """The workers of a tensor-parallel engine. Each exchange is one operator of torch.distributed, without data."""

    size: int
    worker: int = 0

    def sum(self, y: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = torch.ops._c10d_functional.all_reduce_(y, "sum", "")
        return summed

    def join_columns(self, y: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = torch.ops._c10d_functional.all_gather_into_tensor(y, self.size, "")
        return torch.cat(gathered.view(self.size, *y.shape).unbind(), dim=1)

    def broadcast(self, x: torch.Tensor) -> None:
        torch.ops._c10d_functional.broadcast_(x, 0, "")


class MetaEngine:
    """The components of an engine that run steps, configured for `card`, over meta tensors.

    The settings are fields of EngineConfig. `form` is the format of the layers' weights, or None for bfloat16. With
    several workers, the components are those of a worker.
    """

    def __init__(
        self,
        model: Model,
        card: Card,
        *,
        max_len: int,
        max_batch_tokens: int,
        max_sequences: int,
        max_resident_adapters: int,
        num_pages: int,
        form: CodeFormat | None = None,
        adapter_dtype: Literal["fp8"] | None = None,
        kv_dtype: KvDtype = "auto",
        tensor_parallel_size: int = 1,
    ) -> None:
        self.card = card
        config = model_config(model, max_len)
        if tensor_parallel_size > 1:
            check_sharding(config, tensor_parallel_size)
            config = worker_config(config, tensor_parallel_size)
        self.target = pack_target(config, "bfloat16", adapter_dtype, kv_dtype)
        accelerator = UncomputingAccelerator()
        backend = Backend(accelerator, lambda pool, shapes: kernels, DenseLinear, None, sample_tokens=sample_tokens)
        if tensor_parallel_size > 1:
            backend = replace(backend, workers=MetaGroup(tensor_parallel_size))
        if form is not None:
            num_experts = 0 if model.experts is None else model.experts.num_experts
            codes = SharedCodes(form, META, (model.vocab_size, num_experts))
            backend = replace(backend, make_linear=codes.linear, make_experts=codes.experts)
        self.decoder = Decoder(
            config, MetaWeights(), torch.bfloat16, config.max_model_len, backend, kv_itemsize("bfloat16", kv_dtype)
        )
        geometry = self.target.geometry
        cache = self.decoder.cache_layout
        self.num_state_pages = cache.num_state_pages
        self.pool = allocate_pool(
            geometry, num_pages * geometry.pool_page_bytes, torch.bfloat16 if kv_dtype == "auto" else torch.int8,
            torch.bfloat16 if adapter_dtype is None else torch.uint8, META, cache.has_pages_of_blocks,
        )  # fmt: skip
        kernels = self._kernels = GpuKernels(
            self.pool, num_processors=card.multiprocessors, contiguous_attention=flash_attention
        )
        self.tables = SlotTables(self.target, max_resident_adapters, accelerator, self.decoder.outer_factors)
        max_listed_pages = max_sequences * (-(-max_len // PAGE_TOKENS) + cache.num_state_pages)
        has_states = cache.num_state_pages > 0
        buffer = StepBuffer(accelerator, max_batch_tokens, max_sequences, max_listed_pages, has_states=has_states)
        sampler = DeviceSampler(accelerator, sample_tokens, max_sequences, ())
        self._executor = GraphExecutor(self.decoder, kernels, self.tables, accelerator, buffer, sampler, max_sequences)

    def record(self, case: TableCase, note: Callable[[Launch, RecordedStep], None] | None = None) -> RecordedStep:
        """List the case's launches with compiled programs. With `note`, pass each launch to `note` uncompiled instead.

        Listed launches keep their tensors alive. Launches passed to `note` do not.
        """
        self._kernels.max_fused_rows = MAX_ROWS if case.fuses else 0
        ranks = ranks_of(self.target, case.rank, case.modules)
        layout = self.target.layout(ranks)
        packed = PackedAdapter("", layout, np.ones(ranks.shape, np.float32), np.zeros(0, np.uint8))
        for slot in range(case.num_adapters):
            self.tables.write(slot, [0] * layout.num_pages, packed)
        batch = _batch(case, -(-(case.context + case.num_queries) // PAGE_TOKENS), self.num_state_pages)
        if note is not None:
            step = RecordedStep(case, batch, ())
            with recording(self.card.capability, lambda launch: note(launch, step)):
                self._executor.submit(batch).choose()
            return step
        with recording(self.card.capability) as launches:
            self._executor.submit(batch).choose()
        return RecordedStep(case, batch, tuple(launches))


def record_step(
    model: Model,
    card: Card,
    case: TableCase,
    form: CodeFormat | None = None,
    adapter_dtype: Literal["fp8"] | None = None,
    kv_dtype: KvDtype = "auto",
    tensor_parallel_size: int = 1,
) -> RecordedStep:
    """Run the case's step on `model` as if on `card`, and record its launches, or those of one worker."""
    max_len = case.context + case.num_queries
    engine = MetaEngine(
        model, card, max_len=max_len, max_batch_tokens=case.num_tokens, max_sequences=case.num_sequences,
        max_resident_adapters=max(1, case.num_adapters), num_pages=case.num_sequences * -(-max_len // PAGE_TOKENS),
        form=form, adapter_dtype=adapter_dtype, kv_dtype=kv_dtype, tensor_parallel_size=tensor_parallel_size,
    )  # fmt: skip
    return engine.record(case)


def _batch(case: TableCase, pages_each: int, num_state_pages: int) -> Batch:
    scheduled = []
    for index in range(case.num_sequences):
        num_tokens = case.context + case.num_queries
        add = Add(
            sequence_id=str(index), prompt=(0,) * num_tokens, max_tokens=1, sampling=SamplingParams(temperature=0.0)
        )
        slot = index * case.num_adapters // case.num_sequences if case.num_adapters else -1
        blocks = block_list(range(index * pages_each, (index + 1) * pages_each))
        sequence = EngineSequence(
            add=add, owner=b"", arrival=index, seed=0, slot=slot, num_computed=case.context, tables=[PageTable(blocks)],
            state_pages=block_list(range(num_state_pages)),
        )  # fmt: skip
        scheduled.append(ScheduledSequence(sequence, case.num_queries))
    return build_batch(scheduled, PAGE_TOKENS)


@contextmanager
def recording(capability: int, note: Callable[[Launch], None] | None = None) -> Iterator[list[Launch]]:
    """Compile launches for `capability` instead of running them, and list them in order.

    With `note`, each launch is passed to `note` instead, and programs are only identified, not compiled.
    """
    launches: list[Launch] = []
    take = note or launches.append
    run: Callable[..., Any] = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        if note is None:
            program = run(self, *arguments, grid=grid, warmup=True, **options)
        else:
            program = _uncompiled(self, arguments, options)
        named = {name: value for name, value in options.items() if name in self.arg_names}
        bound = dict(self.signature.bind(*arguments, **named).arguments)
        take(TritonLaunch(self.fn.__name__, tuple(grid), bound, program))
        return program

    previous = driver._active
    driver.set_active(_NoDevice(GPUTarget("cuda", capability, 32)))
    JITFunction.run = compile_only
    try:
        with _TorchRecorder(take):
            yield launches
    finally:
        JITFunction.run = run
        driver._active = previous


def _uncompiled(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Uncompiled:
    """The key under which Triton would look up the compiled program."""
    _, known_keys, _, _, bind = kernel.device_caches[driver.active.get_current_device()]
    _, specialization, bound_options = bind(*arguments, **options)
    return Uncompiled(compute_cache_key(known_keys, specialization, bound_options))


@dataclass(frozen=True, slots=True)
class _NoDevice:
    """The part of Triton's driver interface that compilation needs."""

    target: GPUTarget

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


_ALLOCATIONS = ("empty", "new_empty", "empty_like", "empty_strided")


class _TorchRecorder(TorchDispatchMode):
    """Records the operators that run a kernel: all except views and allocations."""

    def __init__(self, take: Callable[[Launch], None]) -> None:
        super().__init__()
        self._take = take

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        returned = func._schema.returns
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in returned)
        name = str(func).split(".")[1]
        outputs = _tensors((result,))
        if not is_view and name not in _ALLOCATIONS and any(one.device == META for one in outputs):
            self._take(TorchLaunch(name, _tensors((*args, *(kwargs or {}).values())), outputs))
        return result


def _tensors(values: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return tuple(found)
