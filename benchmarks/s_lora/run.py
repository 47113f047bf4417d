"""Drives an engine with a list of arrivals, and records the times of each request."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.gpu.bench import CheckError
from benchmarks.s_lora.engine import WAKE_S, OpenEngine
from loramux.engine.protocol.messages import Add, Finished, FromEngine, Stats, StepOutput


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    add: Add


@dataclass(slots=True)
class Journey:
    """Times of one request, in seconds: its arrival, its first token, its latest token and its end."""

    at_s: float
    was_resident: bool
    """True if the adapter was in the pool when the request arrived."""
    first_s: float = math.inf
    latest_s: float = math.inf
    end_s: float = math.inf
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Time to first token from the request's scheduled arrival, even if the engine accepted it later."""
        return self.first_s - self.at_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first. 0 for a single token, and infinity for an unfinished request."""
        if self.end_s == math.inf:
            return math.inf
        return (self.latest_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine's counters and this process's CPU time at one moment."""

    stats: Stats
    cpu_s: float

    @classmethod
    def of(cls, engine: OpenEngine) -> Snapshot:
        return cls(engine.stats(), time.process_time())


@dataclass(slots=True)
class Window:
    """Observations of a run in [begin_s, end_s)."""

    begin_s: float
    end_s: float
    journeys: list[Journey] = field(default_factory=list)
    """The requests that arrived in the window, even if they finished after it."""
    num_tokens: int = 0
    num_first_tokens: int = 0
    num_finished: int = 0
    fewest_sequences: int = 1 << 62
    """The lowest number of waiting and running sequences at any time in the window."""
    before: Snapshot | None = None
    after: Snapshot | None = None

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    @property
    def cpu_s(self) -> float:
        """CPU time of all threads of this process during the window."""
        assert self.before is not None
        assert self.after is not None
        return self.after.cpu_s - self.before.cpu_s

    def counted(self, name: str) -> int:
        """The increase of one of the engine's counters during the window."""
        assert self.before is not None
        assert self.after is not None
        return int(getattr(self.after.stats, name)) - int(getattr(self.before.stats, name))


class Drive:
    """One engine and its arrivals. The clock runs only during this engine's turns, so several engines can alternate.

    Nothing arrives after the window has closed. Requests that are still unfinished `patience_s` later are aborted.
    """

    def __init__(
        self, engine: OpenEngine, arrivals: Iterable[Arrival], begin_s: float, end_s: float, patience_s: float
    ) -> None:
        self._engine = engine
        self._left = deque(arrivals)
        self._patience_s = patience_s
        self._window = Window(begin_s, end_s)
        self._journeys: dict[str, Journey] = {}
        self._num_open = 0
        self._now_s = 0.0
        self._cpu_s = 0.0

    @property
    def is_over(self) -> bool:
        end_s = self._window.end_s
        return self._now_s >= end_s and not (self._num_open and self._now_s < end_s + self._patience_s)

    def run(self, seconds: float) -> None:
        """Step for `seconds` or until the run is over. Raises CheckError if a request ends for a reason other than
        `length`.
        """
        until_s = self._now_s + seconds
        started, cpu_started = time.perf_counter() - self._now_s, time.process_time() - self._cpu_s
        while self._now_s < until_s and not self.is_over:
            self._add()
            self._look(time.process_time() - cpu_started)
            outbox = self._engine.step(self._wait_s())
            self._now_s = time.perf_counter() - started
            for outbound in outbox:
                self._take(outbound.message)
        self._cpu_s = time.process_time() - cpu_started

    def end(self) -> Window:
        self._window.before = self._window.before or self._snapshot(self._cpu_s)
        self._window.after = self._window.after or self._snapshot(self._cpu_s)
        self._engine.abort()
        return self._window

    def _add(self) -> None:
        window = self._window
        while self._left and self._left[0].at_s <= self._now_s < window.end_s:
            arrival = self._left.popleft()
            was_resident = self._engine.is_resident(arrival.add.digest)
            journey = self._journeys[arrival.add.sequence_id] = Journey(arrival.at_s, was_resident)
            if window.begin_s <= arrival.at_s < window.end_s:
                window.journeys.append(journey)
            self._num_open += 1
            self._engine.add(arrival.add)

    def _look(self, cpu_s: float) -> None:
        window = self._window
        if window.before is None and self._now_s >= window.begin_s:
            window.before = self._snapshot(cpu_s)
        if window.after is None and self._now_s >= window.end_s:
            window.after = self._snapshot(cpu_s)
        if window.begin_s <= self._now_s < window.end_s:
            window.fewest_sequences = min(window.fewest_sequences, self._engine.num_sequences)

    def _snapshot(self, cpu_s: float) -> Snapshot:
        return Snapshot(self._engine.stats(), cpu_s)

    def _wait_s(self) -> float:
        return max(0.0, min(WAKE_S, self._left[0].at_s - self._now_s)) if self._left else WAKE_S

    def _take(self, message: FromEngine) -> None:
        window = self._window
        is_inside = window.begin_s <= self._now_s < window.end_s
        match message:
            case StepOutput(outputs=outputs):
                for output in outputs:
                    journey = self._journeys[output.sequence_id]
                    if not journey.num_tokens:
                        journey.first_s = self._now_s
                        window.num_first_tokens += is_inside
                    journey.latest_s = self._now_s
                    journey.num_tokens += len(output.token_ids)
                    window.num_tokens += is_inside * len(output.token_ids)
            case Finished(sequence_id=sequence_id, reason="length"):
                self._journeys[sequence_id].end_s = self._now_s
                window.num_finished += is_inside
                self._num_open -= 1
            case Finished(sequence_id=sequence_id, reason=reason, message=message):
                raise CheckError(f"request {sequence_id} ended with {reason}: {message}")


def drive(engine: OpenEngine, arrivals: Iterable[Arrival], begin_s: float, end_s: float, patience_s: float) -> Window:
    """Run one `Drive` from start to end without turns."""
    one = Drive(engine, arrivals, begin_s, end_s, patience_s)
    one.run(math.inf)
    return one.end()


def drive_in_turns(drives: Sequence[Drive], turn_s: float) -> list[Window]:
    """Run each `Drive` for `turn_s` at a time, so that drift in the machine's speed affects all drives alike."""
    while not all(one.is_over for one in drives):
        for one in drives:
            one.run(turn_s)
    return [one.end() for one in drives]
