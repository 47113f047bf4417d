"""A whole engine in this process, whose steps are observed."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from benchmarks.gpu.bench import Bench, CheckError
from benchmarks.gpu.model import Model
from benchmarks.gpu.random_models import RandomAdapters, RandomWeights, model_directory
from loramux.engine.adapters.stager import MemoryStager
from loramux.engine.assembly import DTYPES, AssembledEngine, assemble_engine
from loramux.engine.batch import Batch
from loramux.engine.config import EngineConfig
from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.device.backend import Backend, DenseLinear, open_backend
from loramux.engine.execution.executor import Executor, StepResult
from loramux.engine.execution.sampler import SampledToken
from loramux.engine.messages import (
    AdapterState,
    Add,
    Finished,
    Load,
    SamplingParams,
    Stats,
    StatsRequest,
    StepOutput,
    TokenLogprobs,
    Unload,
)
from loramux.engine.model.weights import WeightSource

WAKE_S = 0.001
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True, eq=False)
class ObservedStep:
    """One submitted step: its rows, the tokens that its sequences look back on, and marks before and after it."""

    num_tokens: int
    num_context: int
    begin: Any
    end: Any

    @property
    def seconds(self) -> float:
        return float(self.begin.elapsed_time(self.end)) / 1e3


@dataclass(frozen=True, slots=True, eq=False)
class MadeUpTokens:
    """The result of a step that nobody ran."""

    num_samples: int

    def tokens(self) -> list[SampledToken]:
        return [SampledToken(0)] * self.num_samples


@dataclass(frozen=True, slots=True, eq=False)
class AwaitedResult:
    """A step's result that notes how long the host waits for it."""

    result: StepResult
    observer: ObservedExecutor

    def tokens(self) -> list[SampledToken]:
        started = time.perf_counter()
        tokens = self.result.tokens()
        self.observer.waited_s += time.perf_counter() - started
        return tokens


class ObservedExecutor:
    """Runs steps as the executor below does, between two marks in the device's stream.

    While `skips` is set, steps are not run and their tokens are made up: sequences then stand at the end of prompts
    that nobody computed. `num_decoding` counts the sequences of the last skipped step if it was all decodes, else it
    is 0.
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

    def submit(self, batch: Batch) -> StepResult:
        if self.skips:
            self.num_decoding = batch.num_sequences if batch.max_q == 1 else 0
            return MadeUpTokens(len(batch.samples))
        begin, end = self._bench.event(), self._bench.event()
        begin.record()
        result = self.executor.submit(batch)
        end.record()
        self.steps.append(ObservedStep(batch.num_tokens, int(batch.seq_lens.sum()), begin, end))
        return AwaitedResult(result, self)


@dataclass(frozen=True, slots=True)
class Answer:
    """The tokens of one request, with their log-probabilities if it asked for them."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]


@dataclass(frozen=True, slots=True, eq=False)
class RunningEngine:
    """An engine that this thread steps."""

    assembled: AssembledEngine
    observed: ObservedExecutor
    wake: threading.Event
    num_added: Iterator[int] = field(default_factory=itertools.count)

    def add(self, request: Add) -> None:
        """Queue a request in a namespace of its own, so that no prefix of it is ever found in a cache."""
        isolation_key = f"request {next(self.num_added)}".encode()
        self.assembled.engine.add(b"", msgspec.structs.replace(request, isolation_key=isolation_key))

    def stats(self) -> Stats:
        return self.assembled.engine.stats(StatsRequest(call_id=""))

    def step(self) -> None:
        """One step, or a short wait where adapters are loading and nothing else can run."""
        if not self.assembled.engine.step():
            self.wake.wait(WAKE_S)
            self.wake.clear()

    def finish(self) -> list[Any]:
        """Step until nothing is left to do; what the engine said meanwhile."""
        said = []
        while self.assembled.engine.has_work:
            self.step()
            said += [outbound.message for outbound in self.assembled.engine.take_outbox()]
        return said

    def load(self, digests: Iterable[str]) -> None:
        """Make adapters resident; raises CheckError where one cannot be."""
        for digest in digests:
            self.assembled.engine.load(b"", Load(call_id=digest, digest=digest))
        for message in self.finish():
            if isinstance(message, AdapterState) and message.state != "resident":
                raise CheckError(f"the adapter {message.digest} is {message.state}: {message.message}")

    def unload(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self.assembled.engine.unload(b"", Unload(call_id=digest, digest=digest))
        self.finish()

    def abort(self) -> None:
        """End all sequences and forget what was said about them."""
        self.assembled.engine.abort_all()
        self.finish()

    def answer(self, requests: Iterable[Add]) -> dict[str, Answer]:
        """Run requests to their ends; raises CheckError where one ends otherwise than by its length."""
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
                raise CheckError(f"the request {message.sequence_id} ended by {message.reason}: {message.message}")
        return answers


def device_backend(bench: Bench, pdl: bool = False) -> Backend:
    """The GPU's parts; in a tiny run the same with kernels that Triton interprets.

    Nothing is compiled before it is launched: an engine's start would go through every shape that it can reach, and a
    part needs a few of them.
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
    """What engines are timed in; the interpreter cannot multiply bfloat16."""
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
    """An engine of this model on `backend`; `settings` are those of EngineConfig."""
    bench.drop()
    wake = threading.Event()
    if bench.is_tiny:
        settings["num_threads"] = 1
    # Loader threads write to what is allocated here, which tensors of inference mode would not let them.
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
    """Give this thread its usual stream back, once the engine's, which was its current one, is through."""
    if bench.device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.default_stream())
        bench.synchronize()
