"""What the parts of the GPU benchmark share: rows and goals, graphs, clocks and the pool's memory."""

from __future__ import annotations

import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.cards import PlannedCard
from loramux.kernels.gpu.launches import supports_pdl
from loramux.kernels.layout import PageGeometry
from loramux.kernels.tables import PoolViews

FLUSH_BYTES = 256 << 20
"""Read between two replays: several times the L2 of any card, so that each replay finds its weights in memory."""

TINY_FLUSH_BYTES = 1 << 16
MIN_ROUNDS, MAX_ROUNDS = 20, 200
TINY_ROUNDS = 1
MIN_SECONDS = 0.05
MAX_SECONDS = 1.0
"""Each way is replayed `MIN_ROUNDS` times and until its replays took `MIN_SECONDS`, but no more than `MAX_ROUNDS` times
and, where that is long, for `MAX_SECONDS` a way."""

MAX_WARMERS = 12
"""Processes that compile at the same time."""

CONTEXT_BYTES = 10**9
"""Of a card's memory, assumed for what CUDA, cuBLAS and loaded kernels hold in a process: where none can be asked."""

POOL_STD = 0.02
"""Spread of the pool's random elements: a LoRA's A and B, or keys and values, of a usual size."""


class CheckError(Exception):
    """The answer of a kernel is wrong: it is not timed."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound that a figure of a row should keep."""

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
    """One way of doing one case's work. The names of the figures carry their units; `problem` is why some are absent.

    `is_failure` tells a defect of ours, or a case that was left out, from what a peer cannot do.
    """

    case: str
    way: str
    figures: dict[str, float] = field(default_factory=dict)
    goals: tuple[Goal, ...] = ()
    problem: str = ""
    is_failure: bool = False


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the card can do, as the first part measured it: bytes and operations a second, and seconds a graph node."""

    copy: float
    read: float
    matmul: float
    node: float

    @property
    def bandwidth(self) -> float:
        """The better of copying and reading: floors are stated against it."""
        return max(self.copy, self.read)


class HostEvent:
    """Stands in for a CUDA event where Triton's interpreter is the device, whose work is done when a call returns."""

    def __init__(self) -> None:
        self._seconds = math.nan

    def record(self) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds until `end`."""
        return (end._seconds - self._seconds) * 1e3


@dataclass(slots=True)
class Bench:
    """One run: where it runs, how much it does, and how long it may take.

    `is_tiny` shrinks the model to what Triton's interpreter can do; `is_quick` leaves out most cases, `is_full` none;
    `is_timed` is false where only answers are checked. A bench that `is_warming` compiles what another process will
    time: its adapters share a few pages, and its answers are not looked at. `engine_check` is what the check of the
    engine found, which several parts ask for. `planned` is the card for which a dry run lists what a run needs, over
    tensors without memory; None where the work is done.
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
        """bfloat16, but for the interpreter, which multiplies that as if its bits were integers."""
        return torch.float16 if self.is_tiny else torch.bfloat16

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def total_bytes(self) -> int:
        """The card's whole memory."""
        if self.planned is not None:
            return self.planned.memory_bytes
        if self.device.type != "cuda":
            return 1 << 28
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    @property
    def num_processors(self) -> int:
        """The card's multiprocessors; the interpreter runs one program after another."""
        if self.planned is not None:
            return self.planned.card.multiprocessors
        if self.device.type != "cuda":
            return 1
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    @property
    def has_pdl(self) -> bool:
        """Whether launches may overlap (programmatic dependent launch)."""
        return supports_pdl(self.device) if self.planned is None else self.planned.card.capability >= 90

    def generator(self, seed: int) -> torch.Generator | None:
        """A source of random numbers on the device; None where tensors have no memory."""
        return None if self.planned is not None else torch.Generator(self.device).manual_seed(seed)

    def say(self, text: str) -> None:
        if not self.is_warming:
            print(text, flush=True)

    def pool(self, geometry: PageGeometry, num_bytes: int) -> PoolViews:
        """A pool of random elements with this geometry over the first `num_bytes` of one buffer, made when it grows.

        What pages hold is random all over, so that pages need not be filled adapter by adapter.
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
        """Device memory that is neither used nor held for a pool; what torch caches counts as free."""
        if self.planned is not None:
            return self.planned.memory_bytes - CONTEXT_BYTES
        if self.device.type != "cuda":
            return 1 << 28
        self.release()
        return torch.cuda.mem_get_info(self.device)[0] + (self.buffer.numel() if self.buffer is not None else 0)

    def drop(self) -> None:
        """Return all that finished parts held, the pool's memory too."""
        self.buffer = self.flush = None
        self.release()

    def release(self) -> None:
        """Return what finished cases held: graphs keep their memory until they are collected."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def is_broken(self) -> bool:
        """Whether this process has lost its device: after a fault in a kernel every further call fails."""
        try:
            self.synchronize()
            return bool(torch.ones(1, device=self.device).item() != 1)
        except RuntimeError:
            return True

    def guarded(self, case: str, way: str, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows of one case. An exception loses those that were still to come, and a row says which it was.

        Raises what `rows` raises where the device is lost with it.
        """
        try:
            yield from rows
        except Exception as error:
            if self.is_broken():
                raise
            traceback.print_exc()
            yield Row(case, way, problem=f"{type(error).__name__}: {error}", is_failure=True)
        self.release()

    def left_out(self, cases: Iterable[object], way: str) -> Iterator[Row]:
        """A row for each case that there was no time for."""
        return (Row(str(case), way, problem="left out: no time", is_failure=True) for case in cases)

    def event(self) -> Any:
        """A mark in the device's current stream, with `record()` and `elapsed_time(end)` in milliseconds."""
        return torch.cuda.Event(enable_timing=True) if self.device.type == "cuda" else HostEvent()

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        """`launch` as one CUDA graph; it must have run before, so that nothing is compiled while it is captured."""
        if self.device.type != "cuda":
            return launch
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
        return graph.replay

    def time(self, ways: Mapping[str, Callable[[], object]], is_cold: bool = True) -> dict[str, float]:
        """Median seconds of each way, measured in turns so that a drift of the card meets all of them.

        `is_cold` reads `FLUSH_BYTES` before each replay. Reading leaves no changed lines behind, whose writing back
        would fall into the measured time; and it keeps the card busy while the host submits what is timed.
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
    """Whether the ways were replayed often enough; `fewest_s` is the total time of the fastest one."""
    is_long = elapsed_s > MAX_SECONDS * num_ways
    return (num_rounds >= MIN_ROUNDS and fewest_s >= MIN_SECONDS) or (is_long and num_rounds >= 3)


def measuring_seconds(seconds: Sequence[float], flush_s: float) -> float:
    """How long `Bench.time` replays ways that take `seconds` each, with `flush_s` before each replay."""
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
    """The error `‖out - expected‖ / ‖scale‖`, where `scale` is `expected` if not given.

    Raises CheckError where an element is not finite or the error is above `tolerance`; the default is between what
    bfloat16 operands cost and what the slightest wrong index does.
    """
    if not bool(out.isfinite().all()):
        raise CheckError("some elements were not written, or are not finite")
    difference = (out.double() - expected.double()).norm()
    error = float(difference / (expected if scale is None else scale).double().norm())
    if not error <= tolerance:
        raise CheckError(f"the relative error is {error:.2e}, above {tolerance:g}")
    return error
