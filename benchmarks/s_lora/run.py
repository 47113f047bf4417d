"""Drives an engine with timed messages and continuous streams of requests, and records when tokens arrive.

Messages are sent on the engine's own thread between steps, when an engine process would read its socket. The engine
therefore shares the cores and the interpreter only with the threads that load adapters.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from benchmarks.answers import CheckError
from benchmarks.running_engine import WAKE_S, RunningEngine
from loramux.engine.protocol.messages import AdapterState, Add, Finished, FromEngine, Load, Stats, StepOutput


@dataclass(frozen=True, slots=True)
class Stream:
    """A client that keeps `num_open` requests in the engine: when a request ends, it immediately sends another."""

    requests: Iterator[Add]
    num_open: int = 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message, and the time at which it is sent, in seconds."""

    at_s: float
    message: Add | Load
    is_counted: bool = True
    """True if the request is measured, and False if it is part of the background load."""


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
    is_counted: bool = True
    stream: Stream | None = None

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


@dataclass(slots=True)
class Window:
    """Observations of a run in [begin_s, end_s). All times are in seconds."""

    begin_s: float
    end_s: float
    journeys: list[Journey] = field(default_factory=list)
    """The timed requests that arrived in the window, even if they finished after it."""
    gaps_s: list[float] = field(default_factory=list)
    """Times between a measured request's tokens, if the later token arrived in the window."""
    load_gaps_s: list[float] = field(default_factory=list)
    """Times between tokens of the background load's requests, if the later token arrived in the window."""
    loads_s: list[float] = field(default_factory=list)
    """Times between a Load message and its answer. Infinity if no answer arrived."""
    num_cold: int = 0
    """Number of timed requests whose adapter was not in the pool when they arrived."""
    num_tokens: int = 0
    num_first_tokens: int = 0
    num_finished: int = 0
    """Number of requests of any kind that ended in the window."""
    fewest_sequences: int = 1 << 62
    """The lowest number of waiting and running sequences at any time in the window."""
    before: Snapshot | None = None
    after: Snapshot | None = None

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s

    @property
    def first_tokens_s(self) -> list[float]:
        """Times to first token of the measured requests. Infinity if no token arrived."""
        return [one.ttft_s for one in self.journeys if one.is_counted]

    @property
    def cpu_s(self) -> float:
        """CPU time of all threads of this process during the window."""
        assert self.before is not None
        assert self.after is not None
        return self.after.cpu_s - self.before.cpu_s

    @property
    def processor_share(self) -> float:
        """CPU time of all threads, divided by the window's length."""
        return self.cpu_s / self.seconds

    def counted(self, name: str) -> int:
        """The increase of one of the engine's counters during the window."""
        assert self.before is not None
        assert self.after is not None
        return int(getattr(self.after.stats, name)) - int(getattr(self.before.stats, name))


CLOCKS = ("wall", "processor")
"""`processor` is the CPU time of the calling thread, which other processes barely affect. It does not count time spent
waiting for other threads, so use it only with a single-threaded engine.
"""


class Drive:
    """One engine, its arrivals and its streams. The clock runs only during this engine's turns, so several engines can
    alternate.

    After the window, the run continues for at most `patience_s`, until the measured requests have ended or, unless
    `awaits_ends`, have their first tokens, and each Load has its answer. Then everything is aborted.
    """

    def __init__(
        self,
        engine: RunningEngine,
        arrivals: Iterable[Arrival],
        begin_s: float,
        end_s: float,
        patience_s: float,
        streams: Sequence[Stream] = (),
        clock: str = "wall",
        awaits_ends: bool = True,
    ) -> None:
        self._engine = engine
        self._left = deque(arrivals)
        self._patience_s = patience_s
        self._clock = clock
        self._awaits_ends = awaits_ends
        self._window = Window(begin_s, end_s)
        self._journeys: dict[str, Journey] = {}
        self._loads: dict[str, float] = {}
        self._num_awaited = 0
        self._now_s = 0.0
        self._cpu_s = 0.0
        for stream in streams:
            for _ in range(stream.num_open):
                self._continue(stream)

    @property
    def is_over(self) -> bool:
        end_s = self._window.end_s
        is_waiting = self._left or self._num_awaited or self._loads
        return self._now_s >= end_s and not (is_waiting and self._now_s < end_s + self._patience_s)

    def run(self, seconds: float) -> None:
        """Step for `seconds` or until the run is over. Raises CheckError if a request ends for a reason other than
        `length`, or a load fails.
        """
        until_s = self._now_s + seconds
        read = time.perf_counter if self._clock == "wall" else time.thread_time
        started, cpu_started = read() - self._now_s, time.process_time() - self._cpu_s
        while self._now_s < until_s and not self.is_over:
            self._send()
            self._look(time.process_time() - cpu_started)
            if self._clock == "processor" and self._left and not self._engine.num_sequences:
                # An idle engine takes no CPU time, so advance the clock to the next message.
                started -= max(0.0, self._left[0].at_s - (read() - started))
            outbox = self._engine.step(self._wait_s())
            self._now_s = read() - started
            for outbound in outbox:
                self._take(outbound.message)
        self._cpu_s = time.process_time() - cpu_started

    def end(self) -> Window:
        self._window.before = self._window.before or self._snapshot(self._cpu_s)
        self._window.after = self._window.after or self._snapshot(self._cpu_s)
        self._window.loads_s += [math.inf] * len(self._loads)
        self._engine.abort()
        return self._window

    def _send(self) -> None:
        window = self._window
        while self._left and self._left[0].at_s <= self._now_s:
            arrival = self._left.popleft()
            match arrival.message:
                case Load() as load:
                    self._loads[load.call_id] = arrival.at_s
                    self._engine.assembled.engine.load(b"", load)
                case Add() as add:
                    was_resident = self._engine.is_resident(add.digest)
                    journey = Journey(arrival.at_s, was_resident, is_counted=arrival.is_counted)
                    if window.begin_s <= arrival.at_s < window.end_s:
                        window.journeys.append(journey)
                    window.num_cold += not was_resident
                    self._num_awaited += arrival.is_counted
                    self._add(add, journey)

    def _continue(self, stream: Stream) -> None:
        self._add(next(stream.requests), Journey(self._now_s, True, is_counted=False, stream=stream))

    def _add(self, add: Add, journey: Journey) -> None:
        sequence_id = str(len(self._journeys))
        self._journeys[sequence_id] = journey
        self._engine.add(msgspec.structs.replace(add, sequence_id=sequence_id))

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
                    self._note(self._journeys[output.sequence_id], len(output.token_ids), is_inside)
            case Finished(sequence_id=sequence_id, reason="length"):
                journey = self._journeys[sequence_id]
                journey.end_s = self._now_s
                window.num_finished += is_inside
                self._num_awaited -= journey.is_counted and self._awaits_ends
                if journey.stream is not None:
                    self._continue(journey.stream)
            case Finished(sequence_id=sequence_id, reason=reason, message=text):
                raise CheckError(f"request {sequence_id} ended with {reason}: {text}")
            case AdapterState(call_id=call_id, state="resident"):
                window.loads_s.append(self._now_s - self._loads.pop(call_id))
            case AdapterState(message=text):
                raise CheckError(f"an adapter could not be loaded: {text}")

    def _note(self, journey: Journey, num_tokens: int, is_inside: bool) -> None:
        """Record that tokens of a request have arrived."""
        window = self._window
        if not journey.num_tokens:
            journey.first_s = self._now_s
            window.num_first_tokens += is_inside
            self._num_awaited -= journey.is_counted and not self._awaits_ends
        elif is_inside:
            gaps = window.gaps_s if journey.is_counted else window.load_gaps_s
            gaps.append(self._now_s - journey.latest_s)
        journey.latest_s = self._now_s
        journey.num_tokens += num_tokens
        window.num_tokens += is_inside * num_tokens


def drive(
    engine: RunningEngine, arrivals: Iterable[Arrival], begin_s: float, end_s: float, patience_s: float
) -> Window:
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
