"""Computes, without a GPU, what a case of the GPU benchmark needs on a card: tensors, bytes, result rows and time.

Each part lists its cases by calling the functions that run them, but over meta tensors, so the list always matches the
benchmark. Bytes are counted from those tensors. Seconds are derived from bytes, operations and launches, with the
assumptions in this module.
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
"""Assumed ratio of measured time to floor. The goals of `lora` and `step` are 1.35 and 1.25."""

COMPILE_S = 1.0
"""Assumed seconds to compile one program of a Triton kernel."""

WARM_START_S = 10.0
"""Assumed seconds for a compiling process to import torch, initialise the card and create its tensors."""

HOST_OP_S = 10e-6
"""Assumed seconds for the host to submit one operator or kernel outside a graph."""

HOST_STEP_S = 2e-3
"""Assumed seconds for the host to schedule a step that is skipped."""

CHECK_OPS = 10
"""Assumed number of torch operators to check one adapter in one module, or one sequence, against float64."""

NUM_SHAPES = 40
"""Assumed number of step shapes that a run of `s_lora` captures."""

CAPTURE_S = 0.1
"""Assumed seconds to capture one graph, in addition to submitting its launches."""

ENGINE_S = 3.0
"""Assumed seconds to start an engine, in addition to writing its weights and pool."""

CHECK_S = 15.0
"""Assumed seconds to check the engine's answers, including compilation."""

CHECK = "check of the engine"

RANDOM_SHARE = 0.2
"""Assumed rate at which random numbers are written, as a share of the bandwidth."""

FILE_RATE = 5e8
"""Assumed rate, in bytes per second, at which files of adapters are written or loaded, with their checksums."""

ASSUMPTIONS = (
    f"work on the card takes {OVER_FLOOR:g} times its floor, which is the shortest possible time",
    f"{COMPILE_S:g} s to compile a program in one of {MAX_WARMERS} processes, which take {WARM_START_S:g} s to start",
    f"{HOST_OP_S * 1e6:g} us to submit an operator outside a graph, {CAPTURE_S:g} s to capture a graph",
    f"{CHECK_OPS} operators to check one sequence, or one adapter in one module",
    f"{HOST_STEP_S * 1e3:g} ms to schedule a step",
    f"`s_lora` captures {NUM_SHAPES} shapes, and each of its steps runs all sequences at their mean full length",
    f"{ENGINE_S:g} s to start an engine and {CHECK_S:g} s to check its answers once",
    f"files of adapters are written and loaded at {FILE_RATE / 1e9:g} GB/s",
    f"random numbers are written at {RANDOM_SHARE * 100:g} % of the memory bandwidth",
    "torch's attention runs as one fused kernel that does not store scores",
    "all kernels of the peers can be loaded; each peer compiles as many programs as loramux and moves padded weights "
    "once",
    f"a process holds {CONTEXT_BYTES / 1e9:g} GB in addition to its tensors",
)
"""Assumptions about figures that are neither counted nor on a data sheet."""


@dataclass(frozen=True, slots=True)
class Need:
    """One case's needs.

    `shapes` are the shapes of its main tensors, and `num_rows` is the number of result rows that it writes. `held` maps
    each use of memory to its bytes, all allocated at the same time. `seconds` covers set-up, check, warm-up and
    repeats. `programs` names the compiled programs that it launches. `problem` says why the case cannot run.
    """

    case: str
    shapes: Mapping[str, str]
    num_rows: int
    held: Mapping[str, float]
    seconds: float
    programs: frozenset[str] = frozenset()
    problem: str = ""
    num_launches: int = 0
    """Launches of one step of each kind that the case runs, on which its seconds depend. 0 if it runs no steps."""

    @property
    def num_bytes(self) -> float:
        return sum(self.held.values())


def check() -> Need:
    """The check of the engine's answers. In a run, its time counts towards the first part that needs the check."""
    return Need(CHECK, {}, 1, {}, CHECK_S)


def compiling(bytes_each: float) -> Need:
    """Memory of the processes that compile a part's programs in parallel. Their time is counted separately."""
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
    """The time for bytes or for operations, whichever is longer, plus the time of launches in a graph."""
    limits = planned(bench)
    work = max(num_bytes / limits.card.bandwidth, operations / limits.matmul)
    return work + launches * limits.card.node_s


def random_s(bench: Bench, num_bytes: float) -> float:
    """Seconds to fill `num_bytes` with random numbers."""
    return floor_s(bench, num_bytes) / RANDOM_SHARE


class Listed:
    """The launches of a case: their number, their programs and the widest grid."""

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
        """Record launches instead of running them."""
        return recording(planned(bench).card.capability, self.note)


@dataclass(slots=True)
class _Held:
    storage: StorageWeakRef
    num_bytes: int


class MetaMemory(TorchDispatchMode):
    """Counts the bytes that meta tensors would take, both now and at the peak since `restart`.

    Tensors alive at a restart are assumed to live until the next restart.
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
        """Reset the peak. Return the bytes of the tensors that are alive now."""
        self._kept = [one for one in (*self._kept, *self._held.values()) if not one.storage.expired()]
        self._held = {}
        self.peak = self._kept_bytes = sum(one.num_bytes for one in self._kept)
        return self.peak

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = False
        if any(one.alias_info is not None for one in func._schema.returns):
            # The result is a view or a tensor written in place.
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
