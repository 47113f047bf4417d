"""A complete in-process engine that records its steps."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from benchmarks.gpu.bench import Bench, CheckError
from benchmarks.gpu.model import Model
from benchmarks.gpu.random_models import RandomAdapters, RandomWeights, model_directory
from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.constraints.grammar import NO_MASKS, Masks
from loramux.engine.decoder.weights import WeightSource
from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.device.backend import Backend, DenseLinear, open_backend
from loramux.engine.execution.executor import Executor, Forward, StepResult
from loramux.engine.execution.sampler import SampledToken
from loramux.engine.loop.assembly import AssembledEngine, assemble_engine
from loramux.engine.loop.config import EngineConfig
from loramux.engine.loop.loaded_base import DTYPES
from loramux.engine.protocol.messages import (
    AdapterState,
    Add,
    Finished,
    Load,
    PromptLogprob,
    SamplingParams,
    Stats,
    StatsRequest,
    StepOutput,
    TokenLogprobs,
    Unload,
)
from loramux.engine.sequences.batch import Batch

WAKE_S = 0.001
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


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


@dataclass(frozen=True, slots=True)
class Answer:
    tokens: list[int]
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True, eq=False)
class RunningEngine:
    assembled: AssembledEngine
    observed: ObservedExecutor
    wake: threading.Event
    num_added: Iterator[int] = field(default_factory=itertools.count)

    def add(self, request: Add) -> None:
        """Queue a request in its own namespace, so that it never hits the prefix cache."""
        isolation_key = f"request {next(self.num_added)}".encode()
        self.assembled.engine.add(b"", msgspec.structs.replace(request, isolation_key=isolation_key))

    def stats(self) -> Stats:
        return self.assembled.engine.stats(StatsRequest(call_id=""))

    def step(self) -> None:
        """Run one step. If adapters are loading and nothing can run, wait briefly."""
        if not self.assembled.engine.step():
            self.wake.wait(WAKE_S)
            self.wake.clear()

    def finish(self) -> list[Any]:
        """Run steps until no work is left, and return the engine's messages."""
        said = []
        while self.assembled.engine.has_work:
            self.step()
            said += [outbound.message for outbound in self.assembled.engine.take_outbox()]
        return said

    def load(self, digests: Iterable[str]) -> None:
        """Load adapters. Raises CheckError if one cannot be loaded."""
        for digest in digests:
            self.assembled.engine.load(b"", Load(call_id=digest, digest=digest))
        for message in self.finish():
            if isinstance(message, AdapterState) and message.state != "resident":
                raise CheckError(f"adapter {message.digest} is {message.state}: {message.message}")

    def unload(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self.assembled.engine.unload(b"", Unload(call_id=digest, digest=digest))
        self.finish()

    def abort(self) -> None:
        self.assembled.engine.abort_all()
        self.finish()

    def answer(self, requests: Iterable[Add]) -> dict[str, Answer]:
        """Run requests to completion. Raises CheckError if one ends for any reason other than reaching its length."""
        answers = {}
        for request in requests:
            answers[request.sequence_id] = Answer([], [])
            self.add(request)
        for message in self.finish():
            if isinstance(message, StepOutput):
                for output in message.outputs:
                    answers[output.sequence_id].tokens.extend(output.token_ids)
                    answers[output.sequence_id].logprobs.extend(output.logprobs)
            elif isinstance(message, Finished) and message.reason != "length":
                raise CheckError(f"request {message.sequence_id} ended with {message.reason}: {message.message}")
        return answers


def device_backend(bench: Bench, pdl: bool = True) -> Backend:
    """The GPU backend or, in a tiny run, the GPU kernels in Triton's interpreter.

    Kernels are compiled on first launch. An engine normally compiles every shape when it starts, but a part needs only
    a few shapes.
    """
    if not bench.is_tiny:
        return dataclasses.replace(open_backend("cuda", pdl), compiles=False)
    from loramux.kernels.gpu.kernels import GpuKernels
    from loramux.kernels.gpu.sampling import sample_tokens

    return Backend(
        accelerator=HostAccelerator(),
        make_kernels=lambda pool, shapes: GpuKernels(pool),
        make_linear=DenseLinear,
        activation_dtype=None,
        sample_tokens=sample_tokens,
    )


def device_weights(bench: Bench) -> RandomWeights:
    return RandomWeights(bench.device, DTYPES[engine_dtype(bench)])


def engine_dtype(bench: Bench) -> str:
    """bfloat16, or float32 in a tiny run, because the interpreter cannot multiply bfloat16."""
    return "float32" if bench.is_tiny else "bfloat16"


@contextmanager
def open_engine(
    bench: Bench,
    model: Model,
    adapters: RandomAdapters,
    backend: Backend,
    weights: WeightSource,
    *,
    dtype: str,
    max_len: int,
    **settings: Any,
) -> Iterator[RunningEngine]:
    """An engine of this model on `backend`. `settings` are fields of EngineConfig."""
    bench.drop()
    wake = threading.Event()
    if bench.is_tiny:
        settings["num_threads"] = 1
    # Leave inference mode, because the copying thread writes to tensors that are allocated here.
    with torch.inference_mode(False), model_directory(model, max_len) as directory:
        config = EngineConfig(
            model_dir=str(directory),
            blob_url="",
            cache_dir="",
            device=backend.device.type,
            dtype=dtype,
            max_model_len=max_len,
            **settings,
        )
        with ExitStack() as stack:
            stack.callback(_leave_stream, bench)
            assembled = assemble_engine(config, wake.set, MemoryStager(adapters.packed), weights, backend)
            stack.callback(assembled.adapters.close)
            observed = ObservedExecutor(bench, assembled.engine._executor)
            assembled.engine._executor = observed
            yield RunningEngine(assembled, observed, wake)


def _leave_stream(bench: Bench) -> None:
    """Wait for the engine's work, and switch this thread from the engine's stream back to the default stream."""
    if bench.device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.default_stream())
        bench.synchronize()
