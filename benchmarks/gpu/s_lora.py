"""Measures throughput in the S-LoRA workloads S1 and S2, with the same requests for increasing numbers of adapters.

The workloads follow section 7 of "S-LoRA: Serving Thousands of Concurrent LoRA Adapters" (Sheng et al., 2023, arXiv
2311.03285), and the settings of its repository (`benchmarks/exp_suite.py`, the suite behind the paper's table, and
`benchmarks/trace.py`). The model is Llama-7B with adapters on q, k, v and o. Adapters have rank 8 in S1, and ranks 64,
32, 16 and 8 in turn in S2. Input and output lengths are uniform in [8, 512). Adapters are drawn by
`numpy.random.power(alpha)`, which is uniform for the paper's alpha of 1, the hardest case for a pool. The paper's 1,200
requests arrive at 10 per second. Here, all are queued at the start, so that the card always has work, and the
measurement ends as soon as the queue is empty.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from benchmarks.answers import CheckError
from benchmarks.gpu import check as gpu_check
from benchmarks.gpu.bench import Bench, Goal, Row
from benchmarks.gpu.engine import ObservedEngine, engine_dtype, open_engine
from benchmarks.gpu.model import LLAMA_7B, TINY, Model
from benchmarks.gpu.random_models import RandomAdapters
from benchmarks.gpu.warm import WarmStep, warm_steps
from benchmarks.running_engine import GREEDY
from benchmarks.s_lora.workload import DrawnRequest, Lengths, draw_requests
from loramux.engine.protocol.messages import Add, Finished, StepOutput

AdapterDtype = Literal["fp8"] | None

ATTENTION_MODULES = (0, 1, 2, 3)
SETTINGS = {"S1": (8,), "S2": (64, 32, 16, 8)}
PAGE_TOKENS = 16
CAPPED_ADAPTERS = 200
RESERVED = 12 << 30
"""Device memory, in bytes, that the largest pool leaves free for activations and graphs."""

MAX_SECONDS = 120
"""Time limit of one measurement, in seconds: several times its usual length."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Number and lengths of the requests, number of concurrent sequences, and numbers of adapters to compare."""

    num_requests: int
    max_sequences: int
    shortest: int
    longest: int
    max_batch_tokens: int
    num_adapters: tuple[int, ...]

    @property
    def num_answered(self) -> int:
        """Number of requests to answer before the measurement ends. By then the queue is empty."""
        return self.num_requests - self.max_sequences

    @property
    def kv_pages(self) -> int:
        """Number of pages of all concurrent sequences, each at its mean full length."""
        return self.max_sequences * -(-(self.shortest + self.longest) // PAGE_TOKENS)


TINY_WORKLOAD = Workload(3, 2, 2, 4, 16, (1, 3))
PAPER = Workload(1200, 256, 8, 512, 2048, (5, 2000, 100, 1000))
USUAL = Workload(512, 256, 8, 512, 2048, (5, 2000))
SMALL_CARD_BYTES = 100 * 10**9
SMALL_CARD_SEQUENCES = 128
"""Number of concurrent sequences on a card with less than SMALL_CARD_BYTES, which also gets half as many requests. The
pages of 256 sequences would take 71 GB.
"""


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens generated and requests answered in `seconds`, and the loads, evictions and preemptions in that time."""

    seconds: float
    num_tokens: int
    num_requests: int
    num_loads: int
    num_evictions: int
    num_preemptions: int

    @property
    def tokens_s(self) -> float:
        return self.num_tokens / self.seconds

    def figures(self, fewest: Throughput) -> dict[str, float]:
        return {
            "tokens_s": self.tokens_s,
            "requests_s": self.num_requests / self.seconds,
            "over_fewest": self.tokens_s / fewest.tokens_s,
            "seconds": self.seconds,
            "loads": self.num_loads,
            "evictions": self.num_evictions,
            "preemptions": self.num_preemptions,
        }


def workload_of(bench: Bench) -> Workload:
    if bench.is_tiny:
        return TINY_WORKLOAD
    workload = PAPER if bench.is_full else USUAL
    if bench.total_bytes < SMALL_CARD_BYTES:
        return replace(workload, num_requests=workload.num_requests // 2, max_sequences=SMALL_CARD_SEQUENCES)
    return workload


def model_of(bench: Bench) -> Model:
    return TINY if bench.is_tiny else LLAMA_7B


def run(bench: Bench, adapter_dtype: AdapterDtype = None) -> Iterator[Row]:
    """Measure each setting. With `adapter_dtype` fp8, measure S1 with adapters that the pool has as FP8 codes."""
    yield gpu_check.require_right_engine(bench)
    if not bench.is_timed:
        return
    workload = workload_of(bench)
    yield Row("every case", "workload", problem=str(workload))
    for name in settings_to_run(bench, adapter_dtype):
        yield from bench.guarded(name, "engine", _run_setting(bench, name, workload, adapter_dtype))


def settings_to_run(bench: Bench, adapter_dtype: AdapterDtype = None) -> list[str]:
    return ["S1"] if bench.is_tiny or bench.is_quick or adapter_dtype else list(SETTINGS)


def _run_setting(bench: Bench, name: str, workload: Workload, adapter_dtype: AdapterDtype) -> Iterator[Row]:
    fewest = yield from _run_whole(bench, name, workload, adapter_dtype)
    if fewest is not None:
        yield from _run_capped(bench, name, workload, fewest, adapter_dtype)


def warm(bench: Bench, shard: int, num_shards: int, adapter_dtype: AdapterDtype = None) -> None:
    """Compile this process's share of the step shapes that occur."""
    workload = workload_of(bench)
    steps = [step for name in settings_to_run(bench, adapter_dtype) for step in steps_to_warm(workload, name)]
    warm_steps(
        bench,
        model_of(bench),
        ATTENTION_MODULES,
        steps[(shard - 1) % num_shards :: num_shards],
        **settings_of(workload, adapter_dtype),
    )


def steps_to_warm(workload: Workload, name: str) -> list[WarmStep]:
    """Return steps that fill the batch, and steps in which a few prompts join many decodes."""
    most, num_rows = workload.max_sequences, workload.max_batch_tokens
    counts = {(count, num_rows // count) for count in (8, 32, 128) if count < most}
    counts |= {(most, rows) for rows in (1, 2, 3, 4, num_rows // most)}
    return [WarmStep(count, rows, max(SETTINGS[name])) for count, rows in sorted(counts)]


def settings_of(workload: Workload, adapter_dtype: AdapterDtype = None) -> dict[str, Any]:
    return {
        "adapter_dtype": adapter_dtype,
        "max_len": 2 * workload.longest,
        "max_batch_tokens": workload.max_batch_tokens,
        "max_sequences": workload.max_sequences,
        # Enough slots for all requested adapters, so that pages are the limit.
        "max_resident_adapters": min(max(workload.num_adapters), workload.num_requests),
    }


def whole_pool_bytes(bench: Bench) -> int:
    """Bytes of a pool that takes all of the card's memory except the model and RESERVED."""
    if bench.is_tiny:
        return 64 << 20
    bench.drop()
    return bench.free_bytes() - model_of(bench).all_bytes(bench.dtype.itemsize) - RESERVED


def _run_whole(
    bench: Bench, name: str, workload: Workload, adapter_dtype: AdapterDtype
) -> Generator[Row, None, Throughput | None]:
    """Measure every number of adapters on one engine with the largest pool, and return the result for the first number,
    the fewest adapters.
    """
    adapters = RandomAdapters(bench, model_of(bench), engine_dtype(bench), adapter_dtype)
    digests = _make(adapters, name, max(workload.num_adapters))
    pool_bytes = whole_pool_bytes(bench)
    fewest = None
    settings = settings_of(workload, adapter_dtype)
    with open_engine(bench, model_of(bench), adapters, pool_bytes=pool_bytes, **settings) as engine:
        pages = engine.stats().num_pages
        if pages < workload.kv_pages:
            raise MemoryError(f"the pool has {pages} pages, but the sequences alone need {workload.kv_pages}")
        # Run the fewest and the most adapters without timing, to compile the remaining kernels and capture steps.
        for count in (workload.num_adapters[0], max(workload.num_adapters)):
            saturate(bench, engine, workload, digests[:count])
        for number, count in enumerate(workload.num_adapters):
            if bench.seconds_left <= 0:
                left = [_case(name, other, pages) for other in workload.num_adapters[number:]]
                yield from bench.left_out(left, "engine")
                break
            found = saturate(bench, engine, workload, digests[:count])
            fewest = fewest or found
            least = 0.955 if adapter_dtype is None else 0.98
            goals = (Goal("over_fewest", least, is_upper=False),) if (name, count) == ("S1", 2000) else ()
            case = _case(name, count, pages)
            bench.say(f"  {case}: {found.tokens_s:.0f} tokens/s, {found.num_loads} loads")
            yield Row(case, "whole pool", found.figures(fewest), goals)
    return fewest


def _run_capped(
    bench: Bench, name: str, workload: Workload, fewest: Throughput, adapter_dtype: AdapterDtype
) -> Iterator[Row]:
    """Measure the largest number of adapters in a pool with room for the sequences and `CAPPED_ADAPTERS` adapters."""
    count = max(workload.num_adapters)
    adapters = RandomAdapters(bench, model_of(bench), engine_dtype(bench), adapter_dtype)
    digests = _make(adapters, name, count)
    capped = 2 if bench.is_tiny else CAPPED_ADAPTERS
    num_pages = workload.kv_pages + sum(adapters.num_pages(digest) for digest in digests[:capped])
    if bench.seconds_left <= 0:
        yield from bench.left_out([_case(name, count, num_pages)], "capped pool")
        return
    pool_bytes = num_pages * adapters.page_bytes
    settings = settings_of(workload, adapter_dtype)
    with open_engine(bench, model_of(bench), adapters, pool_bytes=pool_bytes, **settings) as engine:
        saturate(bench, engine, workload, digests)
        found = saturate(bench, engine, workload, digests)
    goals = (Goal("over_fewest", 0.95, is_upper=False),) if (name, count) == ("S1", 2000) else ()
    way = f"pool capped at {capped} adapters and {workload.kv_pages} pages of K and V"
    row = Row(_case(name, count, num_pages), way, found.figures(fewest), goals)
    bench.say(f"  {row.case}, capped: {found.tokens_s:.0f} tokens/s, {found.num_loads} loads")
    yield row


def _case(name: str, count: int, num_pages: int) -> str:
    return f"{name} n={count}, {num_pages} pages"


def _make(adapters: RandomAdapters, name: str, count: int) -> list[str]:
    digests = [f"{name}-{number}" for number in range(count)]
    ranks = SETTINGS[name]
    for turn, rank in enumerate(ranks):
        adapters.make(digests[turn :: len(ranks)], rank, ATTENTION_MODULES)
    return digests


def drawn_of(workload: Workload, num_adapters: int = 1) -> list[DrawnRequest]:
    lengths = Lengths(workload.shortest, workload.longest)
    return draw_requests(workload.num_requests, num_adapters, lengths, lengths)


def requests_of(workload: Workload, model: Model, digests: list[str]) -> list[Add]:
    """Return requests whose prompts and lengths do not depend on the number of adapters."""
    tokens = np.random.default_rng(44).integers(model.vocab_size, size=workload.longest).tolist()
    return [
        Add(
            sequence_id=str(number),
            prompt=tuple(tokens[: drawn.num_prompt]),
            max_tokens=drawn.num_output,
            sampling=GREEDY,
            digest=digests[drawn.adapter],
        )
        for number, drawn in enumerate(drawn_of(workload, len(digests)))
    ]


def saturate(bench: Bench, engine: ObservedEngine, workload: Workload, digests: list[str]) -> Throughput:
    """Queue all requests, run steps until `workload.num_answered` of them are answered, and abort the rest.

    No adapter is resident at the start or at the end.
    """
    requests = requests_of(workload, model_of(bench), digests)
    engine.observed.clear()
    before = engine.stats()
    started = time.perf_counter()
    for request in requests:
        engine.add(request)
    num_tokens = num_answered = 0
    while num_answered < workload.num_answered:
        if time.perf_counter() - started > MAX_SECONDS:
            raise CheckError(f"only {num_answered} requests were answered in {MAX_SECONDS} s")
        for outbound in engine.step():
            match outbound.message:
                case StepOutput(outputs=outputs):
                    num_tokens += sum(len(output.token_ids) for output in outputs)
                case Finished(reason="length"):
                    num_answered += 1
                case Finished(sequence_id=sequence_id, reason=reason, message=message):
                    raise CheckError(f"request {sequence_id} ended with {reason}: {message}")
    seconds = time.perf_counter() - started
    after = engine.stats()
    engine.abort()
    engine.unload(dict.fromkeys(request.digest for request in requests if request.digest))
    return Throughput(
        seconds=seconds,
        num_tokens=num_tokens,
        num_requests=num_answered,
        num_loads=after.num_adapter_loads - before.num_adapter_loads,
        num_evictions=after.num_adapter_evictions - before.num_adapter_evictions,
        num_preemptions=after.num_preemptions - before.num_preemptions,
    )
