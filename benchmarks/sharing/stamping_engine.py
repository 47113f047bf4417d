"""An engine without a model whose tokens carry the time: `stamping_engine SCRIPT SOCKET [RECORD]`. SCRIPT is JSON.

The first token of a sequence is sent as soon as its adapter is resident and a sequence slot is free. Later tokens
follow at the script's interval, in one message for all sequences of a client, like the tokens of an engine's step. The
log-probability of each token is `stamp(now)`, if the sequence asks for log-probabilities.

A server starts it as its engine, with the descriptor RECORD of the step record. It then ends with its standard input.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from loramux.engine.protocol.messages import (
    Abort,
    AdapterState,
    Add,
    Credit,
    EngineReady,
    Finished,
    FromEngine,
    Load,
    Pin,
    ResidentAdapter,
    SequenceOutput,
    Stats,
    StatsRequest,
    StepOutput,
    ToEngine,
    TokenLogprobs,
    Unload,
)
from loramux.engine.server.gateway_link import GatewayLink
from loramux.engine.server.step_record import StepRecord

WRAP_S = 1000.0
"""Stamps start again at 0 after this many seconds, because the lowest log-probability of the API is -9999."""
IDLE_S = 0.25
MAX_MODEL_LEN = 4096
NUM_PAGES = 1 << 20


def stamp(now_s: float) -> float:
    """The log-probability that stands for a time of CLOCK_MONOTONIC, which all processes of a machine share."""
    return -(now_s % WRAP_S)


def passed_s(logprob: float, now_s: float) -> float:
    """The seconds from the time that a log-probability stands for until `now_s`."""
    return (now_s + logprob) % WRAP_S


class StampScript(msgspec.Struct, frozen=True, kw_only=True):
    interval_s: float = 0.02
    """Time between two steps."""
    load_s: float = 0.0
    """Time to load an adapter."""
    num_slots: int = 1 << 20
    """Number of adapters that the pool holds. A full pool evicts the least recently used idle adapter."""
    parallel_loads: int = 4
    resident: tuple[str, ...] = ()
    """Digests of the adapters that are resident at the start."""
    capacity: int = 1 << 20
    """Number of sequences that run at once. Other sequences wait, first come, first served."""
    token_ids: tuple[int, ...] = (0,)
    """The tokens of an answer, in order. Longer answers repeat them."""
    counts: str | None = None
    """File to which a byte is appended for each sequence with an adapter (`s`) and for each load (`l`)."""
    model_sha256: str = ""
    base_sha256: str = ""


@dataclass(slots=True, eq=False)
class Sequence:
    owner: bytes
    add: Add
    num_sent: int = 0
    holds_adapter: bool = False

    @property
    def key(self) -> tuple[bytes, str]:
        return self.owner, self.add.sequence_id


class AdapterSlots:
    """The pool of adapters. `wanted` are the adapters to load, in order, with what to do once each is resident."""

    def __init__(self, script: StampScript) -> None:
        self._script = script
        # The number of sequences that use each resident adapter, least recently used first.
        self._users: OrderedDict[str, int] = OrderedDict.fromkeys(script.resident, 0)
        self._loading: dict[str, float] = {}
        self._then: OrderedDict[str, list[Callable[[], None]]] = OrderedDict()
        self._pinned: set[str] = set()
        self.num_loads = 0
        self.num_evictions = 0

    @property
    def next_s(self) -> float:
        """When the next load ends."""
        return min(self._loading.values(), default=math.inf)

    def holds(self, digest: str) -> bool:
        return digest in self._users

    def when_resident(self, digest: str, then: Callable[[], None]) -> None:
        if digest in self._users:
            then()
        else:
            self._then.setdefault(digest, []).append(then)

    def use(self, digest: str) -> None:
        self._users[digest] += 1
        self._users.move_to_end(digest)

    def leave(self, digest: str) -> None:
        self._users[digest] -= 1

    def pin(self, digest: str, is_pinned: bool) -> None:
        (self._pinned.add if is_pinned else self._pinned.discard)(digest)

    def unload(self, digest: str) -> None:
        self._pinned.discard(digest)
        if self._users.get(digest) == 0:
            del self._users[digest]

    def advance(self, now_s: float) -> None:
        """End the loads that are due, and start others."""
        for digest in [digest for digest, due_s in self._loading.items() if due_s <= now_s]:
            del self._loading[digest]
            self._users[digest] = 0
            for then in self._then.pop(digest, []):
                then()
        for digest in self._then:
            if len(self._loading) == self._script.parallel_loads:
                return
            if digest not in self._loading and self._has_room():
                self._loading[digest] = now_s + self._script.load_s
                self.num_loads += 1

    def resident(self) -> tuple[ResidentAdapter, ...]:
        return tuple(
            ResidentAdapter(
                digest=digest, slot=slot, num_pages=1, num_users=num_users, is_pinned=digest in self._pinned
            )
            for slot, (digest, num_users) in enumerate(self._users.items())
        )

    def _has_room(self) -> bool:
        if len(self._users) + len(self._loading) < self._script.num_slots:
            return True
        idle = next((one for one, num in self._users.items() if not num and one not in self._pinned), None)
        if idle is None:
            return False
        del self._users[idle]
        self.num_evictions += 1
        return True


class StampingEngine:
    def __init__(self, socket: Any, script: StampScript, record: StepRecord | None) -> None:
        self._socket = socket
        self._script = script
        self._record = record
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._links: dict[bytes, GatewayLink] = {}
        self._slots = AdapterSlots(script)
        self._sequences: dict[tuple[bytes, str], Sequence] = {}
        self._ready: deque[Sequence] = deque()
        self._running: dict[tuple[bytes, str], Sequence] = {}
        self._num_steps = self._num_prompt_tokens = self._num_tokens = 0
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._counts = None if script.counts is None else os.open(script.counts, flags)

    def serve(self) -> None:
        next_s = time.monotonic() + self._script.interval_s
        while True:
            due_s = min(next_s if self._running else math.inf, self._slots.next_s)
            left_s = min(IDLE_S, max(0.0, due_s - time.monotonic()))
            # A poll waits for whole milliseconds. Steps may be late, because tokens are stamped when they are sent.
            if self._socket.poll(math.ceil(left_s * 1000)):
                self._receive()
            num_loads = self._slots.num_loads
            self._slots.advance(time.monotonic())
            self._count(b"l" * (self._slots.num_loads - num_loads))
            self._start_ready()
            is_step = bool(self._running) and time.monotonic() >= next_s
            if time.monotonic() >= next_s:
                # Do not make up for missed steps.
                next_s = max(time.monotonic(), next_s + self._script.interval_s)
            if is_step:
                self._num_steps += 1
                self._emit(list(self._running.values()))
            if self._record is not None:
                self._record.note_pass()

    def _count(self, events: bytes) -> None:
        if self._counts is not None and events:
            os.write(self._counts, events)

    def _receive(self) -> None:
        while True:
            try:
                owner, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            link = self._link(owner)
            match self._decoder.decode(data):
                case Add() as add:
                    self._add(Sequence(owner, add))
                case Abort(sequence_id=sequence_id):
                    self._abort((owner, sequence_id))
                case Credit(count=count):
                    link.grant(count)
                case StatsRequest(call_id=call_id):
                    link.post(self._stats(call_id))
                case Load(digest=digest) as call:
                    self._slots.when_resident(digest, self._answer(link, call))
                case Pin(digest=digest, is_pinned=is_pinned) as call:
                    self._slots.pin(digest, is_pinned)
                    self._slots.when_resident(digest, self._answer(link, call))
                case Unload(digest=digest, call_id=call_id):
                    self._slots.unload(digest)
                    link.post(AdapterState(call_id=call_id, digest=digest, state="absent"))

    def _link(self, owner: bytes) -> GatewayLink:
        link = self._links.get(owner)
        if link is None:
            link = self._links[owner] = GatewayLink(lambda message: self._send(owner, message))
            link.post(
                EngineReady(
                    max_model_len=MAX_MODEL_LEN,
                    num_pages=NUM_PAGES,
                    page_tokens=16,
                    device="cpu",
                    dtype="float32",
                    model_sha256=self._script.model_sha256,
                    base_sha256=self._script.base_sha256,
                )
            )
        return link

    def _add(self, sequence: Sequence) -> None:
        digest = sequence.add.digest
        self._sequences[sequence.key] = sequence
        if digest is None:
            self._ready.append(sequence)
            return
        self._count(b"s")
        self._slots.when_resident(digest, lambda: self._hold(sequence, digest))

    def _hold(self, sequence: Sequence, digest: str) -> None:
        if self._is_open(sequence):
            sequence.holds_adapter = True
            self._slots.use(digest)
            self._ready.append(sequence)

    def _is_open(self, sequence: Sequence) -> bool:
        return self._sequences.get(sequence.key) is sequence

    def _start_ready(self) -> None:
        started = []
        while self._ready and len(self._running) < self._script.capacity:
            sequence = self._ready.popleft()
            if self._is_open(sequence):
                self._running[sequence.key] = sequence
                self._num_prompt_tokens += len(sequence.add.prompt)
                started.append(sequence)
        self._emit(started)

    def _abort(self, key: tuple[bytes, str]) -> None:
        sequence = self._sequences.get(key)
        if sequence is not None:
            self._end(sequence, "abort")

    def _emit(self, sequences: list[Sequence]) -> None:
        outputs: dict[bytes, list[SequenceOutput]] = {}
        for sequence in sequences:
            outputs.setdefault(sequence.owner, []).append(self._output(sequence))
        for owner, own in outputs.items():
            self._links[owner].post(StepOutput(outputs=tuple(own)))
        for sequence in sequences:
            if sequence.num_sent == sequence.add.max_tokens:
                self._end(sequence, "length")

    def _output(self, sequence: Sequence) -> SequenceOutput:
        token_id = self._script.token_ids[sequence.num_sent % len(self._script.token_ids)]
        sequence.num_sent += 1
        self._num_tokens += 1
        asks = sequence.add.sampling.num_logprobs is not None
        logprobs = (TokenLogprobs(token_id, stamp(time.monotonic())),) if asks else ()
        return SequenceOutput(sequence_id=sequence.add.sequence_id, token_ids=(token_id,), logprobs=logprobs)

    def _end(self, sequence: Sequence, reason: str) -> None:
        del self._sequences[sequence.key]
        has_run = self._running.pop(sequence.key, None) is not None
        if sequence.holds_adapter and sequence.add.digest is not None:
            self._slots.leave(sequence.add.digest)
        self._links[sequence.owner].post(
            Finished(
                sequence_id=sequence.add.sequence_id,
                reason=reason,
                prompt_tokens=len(sequence.add.prompt) if has_run else 0,
                completion_tokens=sequence.num_sent,
            )
        )

    def _answer(self, link: GatewayLink, call: Load | Pin) -> Callable[[], None]:
        return lambda: link.post(AdapterState(call_id=call.call_id, digest=call.digest, state="resident", num_pages=1))

    def _stats(self, call_id: str) -> Stats:
        adapters = self._slots.resident()
        return Stats(
            call_id=call_id,
            num_steps=self._num_steps,
            num_running=len(self._running),
            num_waiting=len(self._sequences) - len(self._running),
            num_pages=NUM_PAGES,
            num_free_pages=NUM_PAGES - len(adapters),
            num_kv_pages=0,
            num_adapter_pages=len(adapters),
            num_prefix_pages=0,
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=self._num_tokens,
            cached_tokens=0,
            num_adapter_loads=self._slots.num_loads,
            num_adapter_evictions=self._slots.num_evictions,
            num_preemptions=0,
            mixed_steps=0,
            max_adapters_in_step=0,
            adapters=adapters,
            num_slots=self._script.num_slots,
        )

    def _send(self, owner: bytes, message: FromEngine) -> None:
        self._socket.send_multipart([owner, self._encoder.encode(message)], zmq.NOBLOCK)


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    script = msgspec.json.decode(sys.argv[1], type=StampScript)
    record = StepRecord(int(sys.argv[3])) if len(sys.argv) > 3 else None
    if record is not None:
        threading.Thread(target=_end_with_input, daemon=True).start()
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.bind(f"ipc://{sys.argv[2]}")
    StampingEngine(socket, script, record).serve()


if __name__ == "__main__":
    main()
