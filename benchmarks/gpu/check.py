"""Compares the engine's answers on the device with plain PyTorch's answers on the CPU, before the engine is timed."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from benchmarks.answers import TOLERANCE, Answer, CheckError, compare
from benchmarks.gpu.bench import Bench, Goal, Row
from benchmarks.gpu.engine import ObservedEngine, device_backend, open_engine
from benchmarks.gpu.model import Model
from benchmarks.gpu.random_models import ALL_MODULES, RandomAdapters, random_prompt
from benchmarks.gpu.random_weights import RandomWeights
from loramux.engine.device.accelerator import HostAccelerator
from loramux.engine.device.backend import Backend, DenseLinear
from loramux.engine.protocol.messages import Add, SamplingParams
from loramux.kernels.reference.kernels import ReferenceKernels

SMALL = Model(4, 512, 1024, 8, 2, 64, 2048)
TINY = Model(1, 64, 64, 2, 1, 16, 64)

WEIGHTS = RandomWeights(torch.device("cpu"), torch.float32)
"""Weights for both engines, generated on the CPU because generators on other devices produce different numbers."""


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A prompt of `num_prompt` tokens, for the base (rank 0) or for an adapter.

    The adapter has the given rank and modules, in all layers from `first_layer` on.
    """

    rank: int
    num_prompt: int
    modules: tuple[int, ...] = ALL_MODULES
    first_layer: int = 0

    @property
    def name(self) -> str:
        return f"r{self.rank}-{self.num_prompt}"


@dataclass(frozen=True, slots=True)
class CheckPlan:
    model: Model
    requests: tuple[CheckedRequest, ...]
    num_tokens: int
    max_batch_tokens: int


# The base's requests come first, so that their rows have the same positions in a batch without adapters.
PLAN = CheckPlan(
    SMALL,
    (
        CheckedRequest(0, 5),
        CheckedRequest(0, 200),
        CheckedRequest(1, 17),
        CheckedRequest(3, 1, modules=(0, 2, 6)),
        CheckedRequest(8, 33, modules=(0, 1, 2, 3)),
        CheckedRequest(16, 300),
        CheckedRequest(31, 64, modules=(1, 3, 5), first_layer=2),
        CheckedRequest(64, 129),
    ),
    num_tokens=32,
    max_batch_tokens=128,
)
TINY_PLAN = CheckPlan(
    TINY,
    (CheckedRequest(0, 3), CheckedRequest(3, 18), CheckedRequest(20, 1, modules=(0, 3, 6))),
    2,
    max_batch_tokens=16,
)


def require_right_engine(bench: Bench) -> Row:
    """The result of the check, which runs once per process. Raises CheckError if the engine's answers are wrong."""
    if bench.engine_check is None:
        try:
            bench.engine_check = checked_engine(bench)
        except CheckError as error:
            bench.engine_check = error
    if isinstance(bench.engine_check, CheckError):
        raise bench.engine_check
    return bench.engine_check


def warm(bench: Bench, fuses: bool = False) -> None:
    """Compile the kernels that the check launches on the device."""
    plan = TINY_PLAN if bench.is_tiny else PLAN
    adapters, digests = _adapters(bench, plan)
    with _open(bench, plan, adapters, device_backend(bench, fuses=fuses)) as engine:
        engine.load(digest for digest in digests.values() if digest)
        engine.answer(_adds(plan, digests))
        engine.answer(_adds(plan, dict.fromkeys(digests)))


def checked_engine(bench: Bench, fuses: bool = False) -> Row:
    """Check the engine's answers. Raises CheckError if they are wrong. `fuses` is that of `device_backend`."""
    plan = TINY_PLAN if bench.is_tiny else PLAN
    adapters, digests = _adapters(bench, plan)
    loaded = [digest for digest in digests.values() if digest]
    with _open(bench, plan, adapters, reference_backend()) as engine:
        engine.load(loaded)
        expected = engine.answer(_adds(plan, digests))
    with _open(bench, plan, adapters, device_backend(bench, fuses=fuses)) as engine:
        engine.load(loaded)
        mixed = engine.answer(_adds(plan, digests))
        worst, num_compared = compare(mixed, expected)
        plain = engine.answer(_adds(plan, dict.fromkeys(digests)))
        # The last request must get the same answer when it runs alone: the rest of the batch must not affect it.
        compare(engine.answer(_adds(plan, digests)[-1:]), expected)
    changes = {request: changed_by(mixed[request.name], plain[request.name]) for request in plan.requests}
    base_change = max(change for request, change in changes.items() if not request.rank)
    if base_change > TOLERANCE:
        raise CheckError(f"the adapters of a mixed batch changed the base's answers by {base_change:.2e}")
    for request, change in changes.items():
        if request.rank and change <= TOLERANCE:
            raise CheckError(f"the adapter of {request.name} changed its answer by only {change:.2e}")
    figures = {"error": worst, "compared_tokens": float(num_compared), "base_change": base_change}
    case = f"float32, {len(plan.requests)} requests, base and ranks to {max(one.rank for one in plan.requests)}"
    # The base's rows should be bit-identical. A change below the tolerance is reported but does not fail the check.
    # Without adapters, cuBLAS multiplies, and rounds differently from the fused product.
    goals = () if fuses else (Goal("base_change", 0.0),)
    return Row(case, "engine against plain PyTorch", figures, goals)


def _adapters(bench: Bench, plan: CheckPlan) -> tuple[RandomAdapters, dict[str, str | None]]:
    adapters = RandomAdapters(bench, plan.model, "float32")
    digests: dict[str, str | None] = {}
    for request in plan.requests:
        digests[request.name] = request.name if request.rank else None
        if request.rank:
            adapters.make([request.name], request.rank, request.modules, request.first_layer)
    return adapters, digests


def _adds(plan: CheckPlan, digests: dict[str, str | None]) -> list[Add]:
    # The two likeliest tokens show whether a different choice is an error.
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, num_logprobs=2)
    return [
        Add(
            sequence_id=request.name,
            prompt=random_prompt(plan.model, request.num_prompt, seed),
            max_tokens=plan.num_tokens,
            sampling=sampling,
            digest=digests[request.name],
        )
        for seed, request in enumerate(plan.requests)
    ]


def reference_backend() -> Backend:
    """Return a CPU backend with the reference kernels. It shares no kernel with the device."""
    return Backend(
        accelerator=HostAccelerator(),
        make_kernels=lambda pool, shapes: ReferenceKernels(pool),
        make_linear=DenseLinear,
        activation_dtype=torch.float32,
    )


def _open(
    bench: Bench, plan: CheckPlan, adapters: RandomAdapters, backend: Backend
) -> AbstractContextManager[ObservedEngine]:
    return open_engine(
        bench,
        plan.model,
        adapters,
        backend,
        WEIGHTS,
        dtype="float32",
        max_len=512,
        pool_bytes=64 << 20,
        max_batch_tokens=plan.max_batch_tokens,
        max_sequences=len(plan.requests),
        max_resident_adapters=len(plan.requests),
    )


def changed_by(answer: Answer, plain: Answer) -> float:
    """The largest difference between two answers' log-probabilities, or infinity if their tokens differ."""
    if answer.tokens != plain.tokens:
        return math.inf
    pairs = zip(answer.logprobs, plain.logprobs, strict=True)
    return max(abs(ours.logprob - theirs.logprob) for ours, theirs in pairs)
