"""Code shared by the parts of the GPU benchmark: rows and goals, graphs, clocks and the pool's memory."""

from __future__ import annotations

import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.answers import CheckError
from benchmarks.gpu.cards import PlannedCard
from loramux.engine.device.device_faults import reason_of
from loramux.kernels.gpu.launches import supports_pdl
from loramux.kernels.layout import PageGeometry
from loramux.kernels.tables import PoolViews

C = TypeVar("C")

FLUSH_BYTES = 256 << 20
"""Bytes read between two replays: at least twice the L2 cache of any card in `CARDS`, so that each replay reads its
weights from memory.
"""

TINY_FLUSH_BYTES = 1 << 16
MIN_ROUNDS, MAX_ROUNDS = 20, 200
TINY_ROUNDS = 1
MIN_SECONDS = 0.05
MAX_SECONDS = 1.0
"""Measuring ends after `MIN_ROUNDS` rounds if the fastest method has run for `MIN_SECONDS`, and after `MAX_ROUNDS`
rounds at the latest. After `MAX_SECONDS` per method, three rounds are enough.
"""

MAX_WARMERS = 12
"""Maximum number of processes that compile at the same time."""

CONTEXT_BYTES = 10**9
"""Assumed memory, in bytes, that CUDA, cuBLAS and loaded kernels take in each process, for dry runs."""

POOL_STD = 0.02
"""Standard deviation of the pool's random elements, typical of A, B, keys and values."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit for one figure in a row."""

    figure: str
    limit: float
    is_upper: bool = True

    def is_met(self, figures: Mapping[str, float]) -> bool:
        value = figures[self.figure]
        return value <= self.limit if self.is_upper else value >= self.limit

    def __str__(self) -> str:
        return f"{self.figure} {'<=' if self.is_upper else '>='} {self.limit:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """One method's figures for one case. A figure's name includes its unit, if it has one. `problem` says why some
    figures are missing.

    `is_failure` is true if loramux failed or a case was skipped, and false if only a peer failed.
    """

    case: str
    way: str
    figures: dict[str, float] = field(default_factory=dict)
    goals: tuple[Goal, ...] = ()
    problem: str = ""
    is_failure: bool = False


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The card's measured limits: `copy` and `read` in bytes/s, `matmul` in operations/s, and `node` in seconds per
    node.
    """

    copy: float
    read: float
    matmul: float
    node: float

    @property
    def bandwidth(self) -> float:
        """The higher of the copy and read bandwidths, for computing floors."""
        return max(self.copy, self.read)


def sentence_of(error: Exception) -> str:
    """Why a part or a case failed, in one line."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the package {error.name} is missing, which the other parts do without"
    return f"{type(error).__name__}: {reason_of(error)}"


class HostEvent:
    def __init__(self) -> None:
        self._seconds = math.nan

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from this event to `end`."""
        return (end._seconds - self._seconds) * 1e3


@dataclass(slots=True)
class Bench:
    """Settings and state of one run: its device, the cases to run, and the time limit.

    `is_tiny` shrinks the model for Triton's interpreter. `is_quick` skips most cases, and `is_full` skips none.
    `is_timed` is false if only answers are checked. With `is_warming`, the process only compiles kernels that another
    process will time: adapters share a few pages, and answers are ignored. `engine_check` caches the result of the
    engine check, which several parts need. `planned` is the card of a dry run, which uses meta tensors; it is None in a
    real run.
    """

    device: torch.device
    is_tiny: bool
    is_quick: bool
    is_full: bool
    is_timed: bool
    is_warming: bool
    peers: Path
    deadline: float = math.inf
    ceilings: Ceilings | None = None
    buffer: torch.Tensor | None = None
    flush: torch.Tensor | None = None
    engine_check: Row | CheckError | None = None
    planned: PlannedCard | None = None

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16, or float16 in the interpreter, which would multiply the bits of bfloat16 as integers."""
        return torch.float16 if self.is_tiny else torch.bfloat16

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def total_bytes(self) -> int:
        """The card's total memory in bytes."""
        if self.planned is not None:
            return self.planned.memory_bytes
        if self.device.type != "cuda":
            return 1 << 28
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    @property
    def num_processors(self) -> int:
        """The card's number of multiprocessors, or 1 in the interpreter, which runs programs one after another."""
        if self.planned is not None:
            return self.planned.card.multiprocessors
        if self.device.type != "cuda":
            return 1
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    @property
    def has_pdl(self) -> bool:
        """True if kernel launches may overlap (programmatic dependent launch)."""
        return supports_pdl(self.device) if self.planned is None else self.planned.card.capability >= 90

    def generator(self, seed: int) -> torch.Generator | None:
        """A random generator on the device, or None in a dry run, where tensors have no memory."""
        return None if self.planned is not None else torch.Generator(self.device).manual_seed(seed)

    def say(self, text: str) -> None:
        if not self.is_warming:
            print(text, flush=True)

    def pool(self, geometry: PageGeometry, num_bytes: int) -> PoolViews:
        """A pool with this geometry over the first `num_bytes` of one shared buffer, which grows if necessary.

        The buffer is filled with random elements, which serve as adapters, keys and values.
        """
        num_pages = num_bytes // geometry.total_page_bytes
        num_bytes = num_pages * geometry.total_page_bytes
        if self.buffer is None or self.buffer.numel() < num_bytes:
            self.buffer = None
            self.release()
            self.buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            generator = self.generator(1)
            for part in self.buffer.view(self.dtype).split(1 << 29):
                part.normal_(0.0, POOL_STD, generator=generator)
        raw = self.buffer[:num_bytes].view(num_pages, geometry.num_layers, geometry.page_bytes)
        return PoolViews(raw=raw, kv=raw.view(self.dtype), adapter=raw.view(self.dtype), geometry=geometry)

    def free_bytes(self) -> int:
        """Free device memory in bytes, including the pool's buffer and torch's cache."""
        if self.planned is not None:
            return self.planned.memory_bytes - CONTEXT_BYTES
        if self.device.type != "cuda":
            return 1 << 28
        self.release()
        return torch.cuda.mem_get_info(self.device)[0] + (self.buffer.numel() if self.buffer is not None else 0)

    def drop(self) -> None:
        """Free all memory of finished parts, including the pool."""
        self.buffer = self.flush = None
        self.release()

    def release(self) -> None:
        """Free the memory of finished cases. Graphs keep their memory until they are garbage-collected."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def is_broken(self) -> bool:
        """True if this process has lost its device. After a fault in a kernel, all further calls to the device fail."""
        try:
            self.synchronize()
            return bool(torch.ones(1, device=self.device).item() != 1)
        except RuntimeError:
            return True

    def guarded(self, case: str, way: str, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the rows of one case. If the case raises an exception, the last row reports it.

        If the device is lost, the exception is raised again instead.
        """
        try:
            yield from rows
        except Exception as error:
            if self.is_broken():
                raise
            traceback.print_exc()
            yield Row(case, way, problem=sentence_of(error), is_failure=True)
        self.release()

    def each(self, cases: Sequence[C], way: str, run_case: Callable[[C], Iterable[Row]]) -> Iterator[Row]:
        """Run the cases until the time is over. Failed and skipped cases have a row that says so."""
        for number, case in enumerate(cases):
            if self.seconds_left <= 0:
                yield from self.left_out(cases[number:], way)
                return
            yield from self.guarded(str(case), way, run_case(case))

    def left_out(self, cases: Iterable[object], way: str) -> Iterator[Row]:
        """A row for each case that was skipped for lack of time."""
        return (Row(str(case), way, problem="left out: no time", is_failure=True) for case in cases)

    def event(self) -> Any:
        """An event in the device's current stream, with `record()` and `elapsed_time(end)` in milliseconds."""
        return torch.cuda.Event(enable_timing=True) if self.device.type == "cuda" else HostEvent()

    def capture(self, launch: Callable[[], object]) -> Callable[[], object]:
        """Capture `launch` as one CUDA graph. `launch` must have run before, so that nothing is compiled during
        capture.
        """
        if self.device.type != "cuda":
            return launch
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        return graph.replay

    def time(self, ways: Mapping[str, Callable[[], object]], is_cold: bool = True) -> dict[str, float]:
        """Median seconds per replay of each method.

        The methods alternate, so that drift in the card's speed affects all of them alike. `is_cold` reads
        `FLUSH_BYTES` before each replay. Unlike writing, reading leaves no dirty cache lines to write back during the
        measured time. It also keeps the card busy while the host submits the timed work.
        """
        if self.flush is None:
            num_bytes = TINY_FLUSH_BYTES if self.is_tiny else FLUSH_BYTES
            self.flush = torch.ones(num_bytes // 4, device=self.device)
        events = {name: (self.event(), self.event()) for name in ways}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for replay in ways.values():
            replay()
        self.synchronize()
        started = time.monotonic()
        for number in range(TINY_ROUNDS if self.is_tiny else MAX_ROUNDS):
            for name, replay in ways.items():
                if is_cold:
                    torch.sum(self.flush)
                begin, end = events[name]
                begin.record()
                replay()
                end.record()
            self.synchronize()
            for name, (begin, end) in events.items():
                seconds[name].append(begin.elapsed_time(end) / 1e3)
            fewest = min(sum(values) for values in seconds.values())
            if _is_measured(number + 1, fewest, time.monotonic() - started, len(ways)):
                break
        return {name: statistics.median(values) for name, values in seconds.items()}


def _is_measured(num_rounds: int, fewest_s: float, elapsed_s: float, num_ways: int) -> bool:
    """True if the methods have been replayed often enough. `fewest_s` is the fastest method's total time."""
    is_long = elapsed_s > MAX_SECONDS * num_ways
    return (num_rounds >= MIN_ROUNDS and fewest_s >= MIN_SECONDS) or (is_long and num_rounds >= 3)


def measuring_seconds(seconds: Sequence[float], flush_s: float) -> float:
    """Seconds that `Bench.time` takes if the methods' replays take `seconds` and each flush takes `flush_s`."""
    round_s = sum(seconds) + flush_s * len(seconds)
    num_rounds = 1
    while num_rounds < MAX_ROUNDS:
        if _is_measured(num_rounds, num_rounds * min(seconds), num_rounds * round_s, len(seconds)):
            break
        num_rounds += 1
    return (num_rounds + 1) * round_s


def require_close(
    out: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor | None = None, tolerance: float = 1e-2
) -> float:
    """Return the relative error `‖out - expected‖ / ‖scale‖`. `scale` defaults to `expected`.

    Raises CheckError if an element is not finite or the error exceeds `tolerance`. The default tolerance lies between
    the rounding error of bfloat16 operands and the error of a single wrong index.
    """
    if not bool(out.isfinite().all()):
        raise CheckError("some elements were not written or are not finite")
    difference = (out.double() - expected.double()).norm()
    error = float(difference / (expected if scale is None else scale).double().norm())
    if not error <= tolerance:
        raise CheckError(f"the relative error is {error:.2e}, above {tolerance:g}")
    return error
