"""What a case of the GPU benchmark needs of a card: its tensors, bytes, rows and time, told without one.

Each part lists its cases with the functions that run them, over tensors without memory, so the list cannot drift from
the benchmark. Bytes are counted from those tensors. Seconds are derived from bytes, operations and launches, with the
assumptions below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.bench import CONTEXT_BYTES, MAX_WARMERS, Bench
from benchmarks.gpu.cards import PlannedCard
from benchmarks.gpu.table_step import META, Launch, TritonLaunch, recording

OVER_FLOOR = 1.5
"""Assumed time over floor. The goals of `lora` and `step` are 1.35 and 1.25."""

COMPILE_S = 1.0
"""Assumed to compile one program of a Triton kernel."""

WARM_START_S = 10.0
"""Assumed for the processes that compile to import torch, open the card and make their tensors."""

HOST_OP_S = 10e-6
"""Assumed for the host to submit one operator or kernel outside a graph."""

HOST_STEP_S = 2e-3
"""Assumed for the host to schedule a step that is not run."""

CHECK_OPS = 10
"""torch operators that compare one adapter in one module, or one sequence, with float64; assumed."""

NUM_SHAPES = 40
"""Shapes of steps that a run of `s_lora` captures, assumed."""

CAPTURE_S = 0.1
"""Assumed to capture one graph, beyond what its launches take to submit."""

ENGINE_S = 3.0
"""Assumed to start an engine, beyond writing its weights and its pool."""

CHECK_S = 15.0
"""Assumed for the check of the engine's answers, the programs that it compiles included."""

CHECK = "check of the engine"

RANDOM_SHARE = 0.2
"""Assumed share of the bandwidth at which random numbers are written."""

ASSUMPTIONS = (
    f"what a card runs takes {OVER_FLOOR:g} times its floor",
    f"{COMPILE_S:g} s to compile a program in one of {MAX_WARMERS} processes, which take {WARM_START_S:g} s to start",
    f"{HOST_OP_S * 1e6:g} us to submit an operator outside a graph, {CAPTURE_S:g} s to capture a graph",
    f"{CHECK_OPS} operators to check an adapter in a module or a sequence; {HOST_STEP_S * 1e3:g} ms to schedule a step",
    f"`s_lora` captures {NUM_SHAPES} shapes, and each of its steps has all sequences at the mean of full lengths",
    f"{ENGINE_S:g} s to start an engine and {CHECK_S:g} s to check its answers once",
    f"random numbers are written at {RANDOM_SHARE:g} of the bandwidth",
    "torch's attention runs as one fused kernel, which holds no scores",
    "all ways of the peers can be loaded; each compiles as many programs as ours, and moves padded weights once",
    f"a process holds {CONTEXT_BYTES / 1e9:g} GB beside its tensors",
)
"""All that is neither counted nor on a data sheet."""


@dataclass(frozen=True, slots=True)
class Need:
    """One case's needs.

    `shapes` are those of its main tensors. `num_rows` is how many rows of the result it writes. `held` is bytes by what
    holds them, all at the same time. `seconds` are those of its set-up, check, warm-up and repeats together, and
    `programs` name the compiled programs that it launches. `problem` says why the case cannot run.
    """

    case: str
    shapes: Mapping[str, str]
    num_rows: int
    held: Mapping[str, float]
    seconds: float
    programs: frozenset[str] = frozenset()
    problem: str = ""

    @property
    def num_bytes(self) -> float:
        return sum(self.held.values())


def check() -> Need:
    """The check of the engine's answers: the first part of a run that needs it pays for it."""
    return Need(CHECK, {}, 1, {}, CHECK_S)


def compiling(bytes_each: float) -> Need:
    """What the processes take that compile a part's programs at the same time; their seconds are counted apart."""
    return Need(f"compiling, {MAX_WARMERS} processes", {}, 0, {"processes": MAX_WARMERS * bytes_each}, 0.0)


def compiling_seconds(num_programs: int) -> float:
    return WARM_START_S + COMPILE_S * num_programs / MAX_WARMERS if num_programs else 0.0


def shape_of(tensor: torch.Tensor) -> str:
    sizes = ", ".join(map(str, tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')} [{sizes}]"


def planned(bench: Bench) -> PlannedCard:
    assert bench.planned is not None
    return bench.planned


def floor_s(bench: Bench, num_bytes: float = 0.0, operations: float = 0.0, launches: int = 0) -> float:
    """The longer of the times for bytes and for operations, and that of launches in a graph."""
    limits = planned(bench)
    work = max(num_bytes / limits.card.bandwidth, operations / limits.matmul)
    return work + launches * limits.card.node_s


def random_s(bench: Bench, num_bytes: float) -> float:
    """Seconds to fill `num_bytes` with random numbers."""
    return floor_s(bench, num_bytes) / RANDOM_SHARE


class Listed:
    """The launches of a case: their cost, their programs and the widest grid."""

    def __init__(self) -> None:
        self.num_launches = 0
        self.programs: set[str] = set()
        self.widest, self._num_widest = "", 0

    def note(self, launch: Launch) -> None:
        self.num_launches += 1
        if isinstance(launch, TritonLaunch):
            self.programs.add(f"{launch.name} {launch.program.hash}")
            if math.prod(launch.grid) > self._num_widest:
                self._num_widest = math.prod(launch.grid)
                self.widest = f"{launch.name} {'x'.join(map(str, launch.grid))}"

    def within(self, bench: Bench) -> AbstractContextManager[list[Launch]]:
        """Note what is launched instead of running it."""
        return recording(planned(bench).card.capability, self.note)


@dataclass(slots=True)
class _Held:
    storage: StorageWeakRef
    num_bytes: int


class MetaMemory(TorchDispatchMode):
    """The bytes that tensors without memory would hold: of those alive, and the most at any time since `restart`.

    What is alive at a restart is taken to live until the next one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._kept: list[_Held] = []
        self._kept_bytes = 0
        self._held: dict[int, _Held] = {}

    @property
    def live(self) -> int:
        self._held = {key: one for key, one in self._held.items() if not one.storage.expired()}
        return self._kept_bytes + sum(one.num_bytes for one in self._held.values())

    def restart(self) -> int:
        """Forget the peak so far; the bytes alive now."""
        self._kept = [one for one in (*self._kept, *self._held.values()) if not one.storage.expired()]
        self._held = {}
        self.peak = self._kept_bytes = sum(one.num_bytes for one in self._kept)
        return self.peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = False
        if any(one.alias_info is not None for one in func._schema.returns):
            # A view, or a tensor that was written in place.
            return result
        for one in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(one, torch.Tensor) and one.device == META:
                storage = one.untyped_storage()
                known = self._held.get(storage._cdata)
                if known is None or known.storage.expired():
                    self._held[storage._cdata] = _Held(StorageWeakRef(storage), storage.nbytes())
                    is_new = True
        if is_new:
            self.peak = max(self.peak, self.live)
        return result
