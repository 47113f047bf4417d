"""When each part of a load happened, for who traces requests; kept only while somebody may still ask."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

MAX_LOADS = 1024
"""Loads that are kept at a time; beyond these the oldest is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedStage:
    """A stage of a load. Times are nanoseconds since 1970; of stages that alternate, each ends with the last."""

    tier: str
    stage: str
    started_ns: int
    ended_ns: int
    num_bytes: int


@dataclass(slots=True)
class LoadTimeline:
    """One load: when it began, and what it passed so far."""

    started_ns: int
    stages: list[PassedStage] = field(default_factory=list)


class LoadTimelines:
    """The loads under way, by digest. Thread-safe.

    Stages are noted by threads that work for one load at a time and say for which by `of`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loads: OrderedDict[str, LoadTimeline] = OrderedDict()
        self._thread = threading.local()

    def begin(self, digest: str) -> None:
        with self._lock:
            self._loads[digest] = LoadTimeline(time.time_ns())
            while len(self._loads) > MAX_LOADS:
                self._loads.popitem(last=False)

    def take(self, digest: str) -> LoadTimeline | None:
        """The load, which is through, and is forgotten; None where it is not known."""
        with self._lock:
            return self._loads.pop(digest, None)

    @contextmanager
    def of(self, digest: str) -> Iterator[None]:
        """What the calling thread notes in the block belongs to this load; blocks may lie in each other."""
        before = getattr(self._thread, "digest", None)
        self._thread.digest = digest
        try:
            yield
        finally:
            self._thread.digest = before

    def extend(self, digest: str, stages: Iterable[PassedStage]) -> None:
        """Stages that the load passed elsewhere."""
        with self._lock:
            load = self._loads.get(digest)
            if load is not None:
                load.stages.extend(stages)

    def note(self, tier: str, stage: str, num_bytes: int, seconds: float) -> None:
        """A stage came to its end just now."""
        digest = getattr(self._thread, "digest", None)
        if digest is None:
            return
        now_ns = time.time_ns()
        passed = PassedStage(
            tier=tier, stage=stage, started_ns=now_ns - int(seconds * 1e9), ended_ns=now_ns, num_bytes=num_bytes
        )
        with self._lock:
            load = self._loads.get(digest)
            if load is not None:
                load.stages.append(passed)
