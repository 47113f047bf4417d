"""Drives an engine with continuous streams of requests and with timed messages, and records when tokens arrive.

Messages are sent on the engine's own thread between steps, when an engine process would read its socket. The engine
therefore shares the cores and the interpreter only with the threads that load adapters.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from benchmarks.gpu.bench import CheckError
from benchmarks.s_lora.engine import WAKE_S, OpenEngine
from benchmarks.s_lora.run import Snapshot
from loramux.engine.loop.engine import Outbound
from loramux.engine.protocol.messages import AdapterState, Add, Finished, Load, StepOutput, Unload


@dataclass(frozen=True, slots=True)
class Stream:
    """A client that keeps `num_open` requests in the engine: when a request ends, it immediately sends another."""

    requests: Iterator[Add]
    num_open: int = 1


@dataclass(frozen=True, slots=True)
class Timed:
    """A message, and the time at which it is sent, in seconds after the window begins."""

    at_s: float
    message: Add | Load
    is_counted: bool = True
    """True if the request is measured, and False if it is part of the background load."""


@dataclass(slots=True)
class Observed:
    """Observations in a window of `seconds`. All lists are in seconds."""

    seconds: float
    first_tokens_s: list[float] = field(default_factory=list)
    """Times to first token of the measured requests that arrived in the window. Infinity if no token arrived."""
    gaps_s: list[float] = field(default_factory=list)
    """Times between a measured request's tokens, if the later token arrived in the window."""
    load_gaps_s: list[float] = field(default_factory=list)
    """Times between tokens of the background load's requests, if the later token arrived in the window."""
    loads_s: list[float] = field(default_factory=list)
    """Times between a Load message and its answer. Infinity if no answer arrived."""
    num_cold: int = 0
    """Number of timed requests whose adapter was not in the pool when they arrived."""
    num_ended: int = 0
    """Number of requests of any kind that ended in the window."""
    num_tokens: int = 0
    fewest_sequences: int = 1 << 62
    """The lowest number of waiting and running requests at any time in the window."""
    before: Snapshot | None = None
    after: Snapshot | None = None

    @property
    def processor_share(self) -> float:
        """CPU time of all threads, divided by the window's length."""
        assert self.before is not None
        assert self.after is not None
        return (self.after.cpu_s - self.before.cpu_s) / self.seconds

    def counted(self, name: str) -> int:
        assert self.before is not None
        assert self.after is not None
        return int(getattr(self.after.stats, name)) - int(getattr(self.before.stats, name))


class WallClock:
    def __init__(self) -> None:
        self._started = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._started

    def skip_to(self, at_s: float) -> None:
        """Do nothing, because the engine's step waits until then."""


class ProcessorClock:
    """CPU time of the calling thread, plus the idle time that is skipped.

    Other processes on the machine barely affect this clock. Use it only with a single-threaded engine, because it does
    not count time spent waiting for other threads.
    """

    def __init__(self) -> None:
        self._started = time.thread_time()

    def now(self) -> float:
        return time.thread_time() - self._started

    def skip_to(self, at_s: float) -> None:
        """Advance the clock to `at_s`, when the next message is due."""
        self._started -= max(0.0, at_s - self.now())


CLOCKS: dict[str, Callable[[], WallClock | ProcessorClock]] = {"wall": WallClock, "processor": ProcessorClock}


@dataclass(slots=True)
class _Request:
    at_s: float
    stream: Stream | None
    is_counted: bool
    latest_s: float = math.inf


class Drive:
    """One run: the engine settles for `warm_s`, and then the window of `seconds` begins.

    The times of messages are relative to the start of the window, and no message is sent after its end. After the
    window, the streams continue until each measured request has its first token and each Load has its answer, for at
    most `patience_s`. Then everything is aborted.
    """

    def __init__(
        self, engine: OpenEngine, warm_s: float, seconds: float, patience_s: float, clock: str = "wall"
    ) -> None:
        self._engine = engine
        self._clock = CLOCKS[clock]
        self._begin_s, self._end_s = warm_s, warm_s + seconds
        self._patience_s = patience_s
        self._observed = Observed(seconds)
        self._requests: dict[str, _Request] = {}
        self._loads: dict[str, float] = {}
        self._num_expected = 0

    def run(self, streams: Sequence[Stream], timed: Iterable[Timed]) -> Observed:
        """Run to the end. Raises CheckError if a request ends for a reason other than its length, or a load fails."""
        observed = self._observed
        left = deque(timed)
        clock = self._clock()
        now = 0.0
        for stream in streams:
            for _ in range(stream.num_open):
                self._add(next(stream.requests), now, stream)
        while now < self._end_s or left or (self._is_expecting and now < self._end_s + self._patience_s):
            while left and left[0].at_s + self._begin_s <= now:
                self._take(left.popleft())
            if observed.before is None and now >= self._begin_s:
                observed.before = Snapshot.of(self._engine)
            if observed.after is None and now >= self._end_s:
                observed.after = Snapshot.of(self._engine)
            if self._is_inside(now):
                observed.fewest_sequences = min(observed.fewest_sequences, self._engine.num_sequences)
            if left and not self._engine.num_sequences:
                clock.skip_to(left[0].at_s + self._begin_s)
            outbox = self._engine.step(max(0.0, min(WAKE_S, left[0].at_s + self._begin_s - now)) if left else WAKE_S)
            now = clock.now()
            self._see(outbox, now)
        observed.before = observed.before or Snapshot.of(self._engine)
        observed.after = observed.after or Snapshot.of(self._engine)
        observed.first_tokens_s += [math.inf] * self._num_expected
        observed.loads_s += [math.inf] * len(self._loads)
        self._engine.abort()
        return observed

    @property
    def _is_expecting(self) -> bool:
        return bool(self._num_expected or self._loads)

    def _is_inside(self, now: float) -> bool:
        return self._begin_s <= now < self._end_s

    def _take(self, timed: Timed) -> None:
        at_s = timed.at_s + self._begin_s
        match timed.message:
            case Load() as load:
                self._loads[load.call_id] = at_s
                self._engine.assembled.engine.load(b"", load)
            case Add() as add:
                self._observed.num_cold += not self._engine.is_resident(add.digest)
                self._num_expected += timed.is_counted
                self._add(add, at_s, None, timed.is_counted)

    def _add(self, add: Add, at_s: float, stream: Stream | None, is_counted: bool = False) -> None:
        sequence_id = str(len(self._requests))
        self._requests[sequence_id] = _Request(at_s, stream, is_counted)
        self._engine.add(msgspec.structs.replace(add, sequence_id=sequence_id))

    def _see(self, outbox: Iterable[Outbound], now: float) -> None:
        observed, is_inside = self._observed, self._is_inside(now)
        for outbound in outbox:
            match outbound.message:
                case StepOutput(outputs=outputs):
                    for output in outputs:
                        self._token(self._requests[output.sequence_id], now, is_inside)
                        observed.num_tokens += is_inside * len(output.token_ids)
                case Finished(sequence_id=sequence_id, reason="length"):
                    observed.num_ended += is_inside
                    stream = self._requests[sequence_id].stream
                    if stream is not None:
                        self._add(next(stream.requests), now, stream)
                case Finished(sequence_id=sequence_id, reason=reason, message=message):
                    raise CheckError(f"request {sequence_id} ended with {reason}: {message}")
                case AdapterState(call_id=call_id, state="resident"):
                    observed.loads_s.append(now - self._loads.pop(call_id))
                case AdapterState(message=message):
                    raise CheckError(f"an adapter could not be loaded: {message}")

    def _token(self, request: _Request, now: float, is_inside: bool) -> None:
        if request.latest_s == math.inf:
            if request.is_counted:
                self._observed.first_tokens_s.append(now - request.at_s)
                self._num_expected -= 1
        elif is_inside:
            gaps = self._observed.gaps_s if request.is_counted else self._observed.load_gaps_s
            gaps.append(now - request.latest_s)
        request.latest_s = now


def keep_only(engine: OpenEngine, digests: Sequence[str]) -> None:
    """Unload all other adapters and load these. Raises CheckError if one cannot be loaded."""
    for entry in engine.stats().adapters:
        if entry.digest not in digests:
            engine.assembled.engine.unload(b"", Unload(call_id=entry.digest, digest=entry.digest))
    preload(engine, digests)


def preload(engine: OpenEngine, digests: Iterable[str]) -> None:
    """Load adapters before anything is measured. Raises CheckError if one cannot be loaded."""
    wanted = set(digests)
    for digest in wanted:
        engine.assembled.engine.load(b"", Load(call_id=digest, digest=digest))
    while engine.assembled.engine.has_work:
        for outbound in engine.step():
            match outbound.message:
                case AdapterState(state="resident", digest=digest):
                    wanted.discard(digest)
    if wanted:
        raise CheckError(f"{len(wanted)} adapters could not be loaded")
