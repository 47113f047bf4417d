"""Counts lookups by tier, and the runs, bytes and seconds of each loading stage. Nothing is counted by adapter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple, TypeVar

from loramux.adapter_store.blobs.circuit_breaker import BreakerState

Tier = Literal["host", "disk", "blobs", "pool"]
Stage = Literal["lookup", "fetch", "verify", "read", "pack", "copy"]

TIERS: tuple[Tier, ...] = ("host", "disk", "blobs")
"""The tiers in which adapters are looked up. `pool`, the engine's page pool, has no lookups."""

STAGES: tuple[tuple[Tier, Stage], ...] = (
    ("host", "lookup"),
    ("disk", "lookup"),
    ("disk", "read"),
    ("disk", "verify"),
    ("blobs", "fetch"),
    ("blobs", "verify"),
    ("blobs", "pack"),
    ("pool", "copy"),
)
"""All counted stages. Listing them keeps the number of metric series fixed.

A lookup on disk includes locking the file. A fetch downloads a packed or canonical file. Verification counts toward the
tier that the file came from. `pack` lays out a canonical file and writes the packed file. `copy` copies from host
memory to pages, and includes the wait for earlier engine steps.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedStage:
    """A stage of one load. Times are nanoseconds since 1970.

    Stages that alternate, such as reading and verifying, end at the same time.
    """

    tier: str
    stage: str
    started_ns: int
    ended_ns: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCounts:
    """Counts for one tier. The blob store has no evictions, and its bytes are not counted."""

    tier: str
    num_hits: int = 0
    num_misses: int = 0
    num_evictions: int = 0
    used_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCounts:
    """Counts for one stage in one tier: number of runs, bytes and total time."""

    tier: str
    stage: str
    count: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCounts:
    tiers: tuple[TierCounts, ...] = ()
    stages: tuple[StageCounts, ...] = ()
    num_loaded: int = 0
    """Number of adapters loaded into host memory."""
    num_failed: int = 0
    num_given_up: int = 0
    """Number of loads that were cancelled before they finished."""
    num_set_aside: int = 0
    """Number of files set aside because they were corrupt."""
    breaker: BreakerState = "closed"
    """State of the circuit breaker: the blob store is in use (`closed`), failing (`open`) or being tested
    (`half_open`).
    """


C = TypeVar("C", TierCounts, StageCounts, LoadCounts)


def added(first: LoadCounts, second: LoadCounts) -> LoadCounts:
    """Add the counts of two processes. The breaker state is the first that is not `closed`."""
    return replace(
        _sum(first, second),
        tiers=tuple(_sum(*both) for both in zip(first.tiers, second.tiers, strict=True)),
        stages=tuple(_sum(*both) for both in zip(first.stages, second.stages, strict=True)),
        breaker=second.breaker if first.breaker == "closed" else first.breaker,
    )


def _sum(one: C, other: C) -> C:
    """Add the numbers of two records up. The other fields are those of `one`."""
    named = [(field.name, getattr(one, field.name), getattr(other, field.name)) for field in fields(one)]
    return replace(one, **{name: mine + its for name, mine, its in named if isinstance(mine, int | float)})


def of_the_past(counts: LoadCounts) -> LoadCounts:
    """Return the counts of a process that has exited, with no bytes in use and the breaker closed."""
    return replace(counts, tiers=tuple(replace(one, used_bytes=0) for one in counts.tiers), breaker="closed")


class Held(NamedTuple):
    """The number of bytes now in a tier, and the number of evictions since the tier was opened."""

    used_bytes: int
    num_evictions: int


_NOTHING = Held(0, 0)


@dataclass(slots=True)
class TimedStage:
    """A stage in progress. The timed code may set `num_bytes` once it knows the number."""

    num_bytes: int


def closed() -> BreakerState:
    """Return the breaker state of a process without a blob store."""
    return "closed"


class TierFigures:
    """One process's counts. Thread-safe.

    `held` returns the bytes and evictions of the process's bounded tiers, and `breaker` returns the state of its blob
    store's circuit breaker.
    """

    def __init__(
        self, held: Callable[[], Mapping[Tier, Held]] = dict, breaker: Callable[[], BreakerState] = closed
    ) -> None:
        self._held = held
        self._breaker = breaker
        self._lock = threading.Lock()
        self._hits = dict.fromkeys(TIERS, 0)
        self._misses = dict.fromkeys(TIERS, 0)
        self._stages = dict.fromkeys(STAGES, (0, 0, 0.0))
        self._ends = {"loaded": 0, "failed": 0, "given_up": 0, "set_aside": 0}
        self._thread = threading.local()

    def count_lookup(self, tier: Tier, is_hit: bool) -> None:
        with self._lock:
            (self._hits if is_hit else self._misses)[tier] += 1

    def count_stage(self, tier: Tier, stage: Stage, num_bytes: int, seconds: float) -> None:
        with self._lock:
            count, total_bytes, total_s = self._stages[tier, stage]
            self._stages[tier, stage] = (count + 1, total_bytes + num_bytes, total_s + seconds)
        noted = self.noted
        if noted is not None:
            now_ns = time.time_ns()
            noted.append(
                PassedStage(
                    tier=tier, stage=stage, started_ns=now_ns - int(seconds * 1e9), ended_ns=now_ns, num_bytes=num_bytes
                )
            )

    @property
    def noted(self) -> list[PassedStage] | None:
        """The list to which the calling thread's stages are appended, or None: see `noting`."""
        noted: list[PassedStage] | None = getattr(self._thread, "noted", None)
        return noted

    @contextmanager
    def noting(self, stages: list[PassedStage] | None) -> Iterator[None]:
        """Within the block, append to `stages` each stage that the calling thread counts."""
        before = self.noted
        self._thread.noted = stages
        try:
            yield
        finally:
            self._thread.noted = before

    @contextmanager
    def timed(self, tier: Tier, stage: Stage, num_bytes: int = 0) -> Iterator[TimedStage]:
        """Time the block as a stage, and count it unless the block raises."""
        timed = TimedStage(num_bytes)
        started_s = time.perf_counter()
        yield timed
        self.count_stage(tier, stage, timed.num_bytes, time.perf_counter() - started_s)

    def count_end(self, end: Literal["loaded", "failed", "given_up", "set_aside"]) -> None:
        with self._lock:
            self._ends[end] += 1

    def snapshot(self) -> LoadCounts:
        held = self._held()
        with self._lock:
            return LoadCounts(
                tiers=tuple(
                    TierCounts(
                        tier=tier,
                        num_hits=self._hits[tier],
                        num_misses=self._misses[tier],
                        num_evictions=held.get(tier, _NOTHING).num_evictions,
                        used_bytes=held.get(tier, _NOTHING).used_bytes,
                    )
                    for tier in TIERS
                ),
                stages=tuple(
                    StageCounts(tier=tier, stage=stage, count=count, num_bytes=num_bytes, seconds=seconds)
                    for (tier, stage), (count, num_bytes, seconds) in self._stages.items()
                ),
                num_loaded=self._ends["loaded"],
                num_failed=self._ends["failed"],
                num_given_up=self._ends["given_up"],
                num_set_aside=self._ends["set_aside"],
                breaker=self._breaker(),
            )
