"""A complete in-process engine that records its steps."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.model import Model
from benchmarks.gpu.random_models import RandomAdapters, model_directory
from benchmarks.gpu.random_weights import RandomWeights
from benchmarks.running_engine import RunningEngine, start_engine
from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.constraints.grammar import NO_MASKS, Masks
from loramux.engine.decoder.weights import WeightSource
from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.device.backend import Backend, DenseLinear, open_backend
from loramux.engine.execution.executor import Executor, Forward, StepResult
from loramux.engine.execution.sampler import HeadDrafts, SampledToken
from loramux.engine.loop.config import EngineConfig
from loramux.engine.loop.loaded_base import DTYPES
from loramux.engine.protocol.messages import Add, PromptLogprob
from loramux.engine.sequences.batch import Batch, RepeatRows
from loramux.kernels.dispatch import Kernels, KernelShapes
from loramux.kernels.tables import PoolViews

if TYPE_CHECKING:
    # Most parts run where the packages that read files of adapters are not installed.
    from benchmarks.s_lora.adapters import AdapterFiles


@dataclass(frozen=True, slots=True, eq=False)
class ObservedStep:
    """One submitted step: its rows, the total context of its sequences in tokens, and events before and after it."""

    num_tokens: int
    num_context: int
    begin: Any
    end: Any

    @property
    def seconds(self) -> float:
        return float(self.begin.elapsed_time(self.end)) / 1e3


@dataclass(frozen=True, slots=True, eq=False)
class MadeUpTokens:
    """Stands in for a skipped step and for its result."""

    num_samples: int

    def choose(self, masks: Masks = NO_MASKS, unused: Collection[int] = ()) -> MadeUpTokens:
        return self

    def tokens(self) -> list[SampledToken]:
        return [SampledToken(0)] * self.num_samples

    def prompt_logprobs(self) -> list[tuple[PromptLogprob, ...]]:
        return []

    def pooled(self) -> list[npt.NDArray[np.float64]]:
        return []

    def head_drafts(self) -> HeadDrafts | None:
        return None

    def repeat_rows(self) -> RepeatRows | None:
        return None


@dataclass(frozen=True, slots=True, eq=False)
class AwaitedResult:
    """A step's result that records how long the host waits for it."""

    result: StepResult
    observer: ObservedExecutor

    def tokens(self) -> list[SampledToken]:
        started = time.perf_counter()
        tokens = self.result.tokens()
        self.observer.waited_s += time.perf_counter() - started
        return tokens

    def prompt_logprobs(self) -> list[tuple[PromptLogprob, ...]]:
        return self.result.prompt_logprobs()

    def pooled(self) -> list[npt.NDArray[np.float64]]:
        return self.result.pooled()

    def head_drafts(self) -> HeadDrafts | None:
        return self.result.head_drafts()

    def repeat_rows(self) -> RepeatRows | None:
        return self.result.repeat_rows()


@dataclass(frozen=True, slots=True, eq=False)
class ObservedForward:
    """A submitted step that records when its tokens are chosen."""

    forward: Forward
    observer: ObservedExecutor
    end: Any

    def choose(self, masks: Masks = NO_MASKS, unused: Collection[int] = ()) -> AwaitedResult:
        result = self.forward.choose(masks, unused)
        self.end.record()
        return AwaitedResult(result, self.observer)


class ObservedExecutor:
    """Runs each step on the wrapped executor, and records an event on the device's stream before and after it.

    While `skips` is true, steps do not run and return dummy tokens, so that prompts need not be computed.
    `num_decoding` is the number of sequences in the last skipped step if all were decoding, otherwise 0.
    """

    def __init__(self, bench: Bench, executor: Executor) -> None:
        self._bench = bench
        self.executor = executor
        self.skips = False
        self.num_decoding = 0
        self.steps: list[ObservedStep] = []
        self.waited_s = 0.0

    def clear(self) -> None:
        self.steps = []
        self.waited_s = 0.0

    def submit(self, batch: Batch) -> Forward:
        if self.skips:
            self.num_decoding = batch.num_sequences if batch.max_q == 1 else 0
            return MadeUpTokens(len(batch.samples))
        begin, end = self._bench.event(), self._bench.event()
        begin.record()
        forward = self.executor.submit(batch)
        self.steps.append(ObservedStep(batch.num_tokens, int(batch.seq_lens.sum()), begin, end))
        return ObservedForward(forward, self, end)


@dataclass(frozen=True, slots=True, eq=False)
class ObservedEngine(RunningEngine):
    observed: ObservedExecutor
    num_added: Iterator[int] = field(default_factory=itertools.count)

    def add(self, request: Add) -> None:
        """Queue a request in its own namespace, so that it never hits the prefix cache."""
        isolation_key = f"request {next(self.num_added)}".encode()
        self.assembled.engine.add(b"", msgspec.structs.replace(request, isolation_key=isolation_key))


def device_backend(bench: Bench, pdl: bool = True, fuses: bool = False) -> Backend:
    """The GPU backend or, in a tiny run, the GPU kernels in Triton's interpreter.

    Kernels are compiled on first launch. An engine normally compiles every shape when it starts, but a part needs only
    a few shapes. With `fuses`, linear layers and their adapters are multiplied together.
    """
    if not bench.is_tiny:
        return dataclasses.replace(open_backend("cuda", pdl, fused_lora=fuses), compiles=False)
    from loramux.kernels.gpu.kernels import GpuKernels
    from loramux.kernels.gpu.lora.lora_linear import MAX_ROWS
    from loramux.kernels.gpu.sampling import sample_tokens

    def make_kernels(pool: PoolViews, shapes: KernelShapes) -> Kernels:
        kernels = GpuKernels(pool)
        kernels.max_fused_rows = MAX_ROWS if fuses else 0
        return kernels

    return Backend(
        accelerator=HostAccelerator(),
        make_kernels=make_kernels,
        make_linear=DenseLinear,
        activation_dtype=None,
        sample_tokens=sample_tokens,
    )


def engine_dtype(bench: Bench) -> str:
    """bfloat16, or float32 in a tiny run, because the interpreter cannot multiply bfloat16."""
    return "float32" if bench.is_tiny else "bfloat16"


@contextmanager
def open_engine(
    bench: Bench,
    model: Model,
    adapters: RandomAdapters,
    backend: Backend | None = None,
    weights: WeightSource | None = None,
    *,
    dtype: str | None = None,
    max_len: int,
    stored: AdapterFiles | None = None,
    **settings: Any,
) -> Iterator[ObservedEngine]:
    """An engine of this model with random weights, on the device unless `backend` is given. `settings` are fields of
    EngineConfig.

    With `stored`, a staging process loads adapters from these files instead of from this process's memory.
    """
    bench.drop()
    backend, dtype = backend or device_backend(bench), dtype or engine_dtype(bench)
    weights = weights or RandomWeights(bench.device, DTYPES[dtype])
    if bench.is_tiny:
        settings["num_threads"] = 1
    # Leave inference mode, because the copying thread writes to tensors that are allocated here.
    with torch.inference_mode(False), model_directory(model, max_len) as directory:
        config = EngineConfig(
            model_dir=str(directory),
            blob_url="" if stored is None else stored.blob_url,
            cache_dir="" if stored is None else str(stored.cache_dir),
            device=backend.device.type,
            dtype=dtype,
            max_model_len=max_len,
            **settings,
        )
        try:
            stager = MemoryStager(adapters.packed) if stored is None else None
            with start_engine(config, stager, weights, backend) as engine:
                observed = ObservedExecutor(bench, engine.assembled.engine._executor)
                engine.assembled.engine._executor = observed
                yield ObservedEngine(engine.assembled, engine.wake, observed)
        finally:
            if bench.device.type == "cuda":
                # Switch this thread from the engine's stream back to the default stream, and wait for the work.
                torch.cuda.set_stream(torch.cuda.default_stream())
                bench.synchronize()
