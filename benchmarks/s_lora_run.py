"""Drives an engine by a list of arrivals and keeps what happened to each request, and when."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from benchmarks.gpu_bench import CheckError
from benchmarks.s_lora_engine import WAKE_S, OpenEngine
from loramux.engine.messages import Add, Finished, Stats, StepOutput


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and the second at which it arrives."""

    at_s: float
    add: Add


@dataclass(slots=True)
class Journey:
    """One request's seconds: when it came, and when its first and its latest token came out."""

    at_s: float
    was_resident: bool
    """Whether its adapter was in the pool when it came."""
    first_s: float = math.inf
    latest_s: float = math.inf
    end_s: float = math.inf
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """Counted from when the request came, whether or not the engine had time to take it then."""
        return self.first_s - self.at_s

    @property
    def tpot_s(self) -> float:
        """The mean time of a token after the first; 0 where there is none."""
        if self.end_s == math.inf:
            return math.inf
        return (self.latest_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the engine has counted so far, and this process's processor time."""

    stats: Stats
    cpu_s: float

    @classmethod
    def of(cls, engine: OpenEngine) -> Snapshot:
        return cls(engine.stats(), time.process_time())


@dataclass(slots=True)
class Window:
    """What happened in [begin_s, end_s) of a run."""

    begin_s: float
    end_s: float
    journeys: list[Journey] = field(default_factory=list)
    """Of the requests that arrived in it, however long they took."""
    num_tokens: int = 0
    num_first_tokens: int = 0
    num_finished: int = 0
    fewest_sequences: int = 1 << 62
    """The fewest sequences that waited or ran at any time in it."""
    before: Snapshot | None = None
    after: Snapshot | None = None

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    @property
    def cpu_s(self) -> float:
        """Processor time of all threads."""
        assert self.before is not None
        assert self.after is not None
        return self.after.cpu_s - self.before.cpu_s

    def counted(self, name: str) -> int:
        """How far a counter of the engine's statistics came."""
        assert self.before is not None
        assert self.after is not None
        return int(getattr(self.after.stats, name)) - int(getattr(self.before.stats, name))


def drive(engine: OpenEngine, arrivals: Iterable[Arrival], begin_s: float, end_s: float, patience_s: float) -> Window:
    """Let requests arrive at their times, and step until the window closes.

    From then on nothing arrives, and the requests that came in the window have `patience_s` to be answered; the rest
    are aborted. Raises CheckError where one ends otherwise than by its length.
    """
    window = Window(begin_s, end_s)
    journeys: dict[str, Journey] = {}
    left = deque(arrivals)
    num_open = 0
    started = time.perf_counter()
    now = 0.0
    while now < end_s or (num_open and now < end_s + patience_s):
        while left and left[0].at_s <= now < end_s:
            arrival = left.popleft()
            journey = journeys[arrival.add.sequence_id] = Journey(arrival.at_s, engine.is_resident(arrival.add.digest))
            if begin_s <= arrival.at_s < end_s:
                window.journeys.append(journey)
            num_open += 1
            engine.add(arrival.add)
        if window.before is None and now >= begin_s:
            window.before = Snapshot.of(engine)
        if window.after is None and now >= end_s:
            window.after = Snapshot.of(engine)
        if begin_s <= now < end_s:
            window.fewest_sequences = min(window.fewest_sequences, engine.num_sequences)
        wait_s = max(0.0, min(WAKE_S, left[0].at_s - now)) if left else WAKE_S
        outbox = engine.step(wait_s)
        now = time.perf_counter() - started
        is_inside = begin_s <= now < end_s
        for outbound in outbox:
            match outbound.message:
                case StepOutput(outputs=outputs):
                    for output in outputs:
                        journey = journeys[output.sequence_id]
                        if not journey.num_tokens:
                            journey.first_s = now
                            window.num_first_tokens += is_inside
                        journey.latest_s = now
                        journey.num_tokens += len(output.token_ids)
                        window.num_tokens += is_inside * len(output.token_ids)
                case Finished(sequence_id=sequence_id, reason="length"):
                    journeys[sequence_id].end_s = now
                    window.num_finished += is_inside
                    num_open -= 1
                case Finished(sequence_id=sequence_id, reason=reason, message=message):
                    raise CheckError(f"the request {sequence_id} ended by {reason}: {message}")
    window.before = window.before or Snapshot.of(engine)
    window.after = window.after or Snapshot.of(engine)
    engine.abort()
    return window
