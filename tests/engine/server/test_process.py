from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from loramux.engine.protocol.messages import (
    AdapterState,
    Credit,
    Finished,
    FromEngine,
    Heartbeat,
    Pin,
    Rejected,
    Stats,
    StatsRequest,
    StepOutput,
    ToEngine,
)
from loramux.engine.server.process import EngineServer
from loramux.engine.server.step_record import StepRecord
from tests.engine.server.assembled_parts import READY, Stager
from tests.engine.simulated_engine import Simulation, simulate_engine


class Gateway:
    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, 10_000)
        self._socket.connect(f"ipc://{path}")
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    def send(self, message: ToEngine) -> None:
        self.send_raw(msgspec.msgpack.encode(message))

    def send_raw(self, *frames: bytes) -> None:
        self._socket.send_multipart(frames)

    def receive(self) -> FromEngine:
        while isinstance(message := self._decoder.decode(self._socket.recv()), Heartbeat):
            continue
        return message

    def die(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture
def simulation() -> Simulation:
    return simulate_engine(adapters={"a": 2})


@pytest.fixture
def stager() -> Iterator[Stager]:
    stager = Stager()
    yield stager
    stager.close()


@dataclass(frozen=True)
class Served:
    """A server whose loop does not run, and two of its gateways."""

    server: EngineServer
    socket: zmq.Socket[bytes]
    gateways: tuple[Gateway, Gateway]
    end: Callable[[], None]


@pytest.fixture
def stopped(simulation: Simulation, stager: Stager, short_path: Path) -> Iterator[Served]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.bind(f"ipc://{short_path / 'engine'}")
    wake_read, wake_write = os.pipe()
    ended = threading.Event()
    record = StepRecord(StepRecord.new_file(max_sequences=4))
    assembled = SimpleNamespace(
        engine=simulation.engine, ready=READY, stager=stager, grammars=simulation.grammars, workers=None
    )

    def end() -> None:
        ended.set()
        os.write(wake_write, b"\0")

    server = EngineServer(assembled, socket, wake_read, record, ended)  # type: ignore[arg-type]
    gateways = Gateway(context, short_path / "engine"), Gateway(context, short_path / "engine")
    yield Served(server, socket, gateways, end)
    context.destroy(linger=0)
    os.close(wake_read)
    os.close(wake_write)


@pytest.fixture
def served(stopped: Served) -> Iterator[tuple[Gateway, Gateway]]:
    loop = threading.Thread(target=stopped.server.serve)
    loop.start()
    yield stopped.gateways
    stopped.end()
    loop.join()


def test_unreadable_message_is_rejected_without_side_effects(
    served: tuple[Gateway, Gateway], simulation: Simulation
) -> None:
    broken, sound = served
    for frames in ((b"\xc1",), (b"",), (b"\x81", b"\xa4type"), (msgspec.msgpack.encode({"type": "Nonsense"}),)):
        broken.send_raw(*frames)
    assert broken.receive() == READY
    for _ in range(4):
        rejected = broken.receive()
        assert isinstance(rejected, Rejected)
        assert "could not be read" in rejected.message
    add = simulation.make_add("s", (1, 2, 3), 4)
    sound.send(Credit(count=10))
    sound.send(add)
    assert sound.receive() == READY
    outputs = [sound.receive() for _ in range(4)]
    tokens = [token for one in outputs if isinstance(one, StepOutput) for token in one.outputs[0].token_ids]
    assert tokens == simulation.expected(add)
    assert isinstance(sound.receive(), Finished)


def test_only_sequences_that_are_not_in_the_background_are_urgent(stopped: Served, simulation: Simulation) -> None:
    gateway, is_urgent = stopped.gateways[0], simulation.engine.has_urgent

    def arrives(message: ToEngine) -> None:
        gateway.send(message)
        assert stopped.socket.poll(10_000)

    arrives(StatsRequest(call_id="s"))
    assert not is_urgent()
    arrives(simulation.make_add("line", (1, 2, 3), 4, is_background=True))
    assert not is_urgent()
    arrives(simulation.make_add("chat", (1, 2, 3), 4))
    assert is_urgent()
    assert is_urgent(), "until it has been added"
    assert simulation.engine.num_sequences == 0, "nothing changes within a step"
    stopped.server._receive(0)
    assert simulation.engine.num_sequences == 2
    assert not is_urgent()


def test_a_malformed_message_is_not_answered_within_a_step(stopped: Served, simulation: Simulation) -> None:
    # If the gateway were gone, the failed answer would end its sequences, which the step computes.
    gateway = stopped.gateways[0]
    gateway.send_raw(b"\xc1")
    assert stopped.socket.poll(10_000)
    assert not simulation.engine.has_urgent()
    assert not stopped.server._links
    stopped.server._receive(0)
    assert gateway.receive() == READY
    assert isinstance(gateway.receive(), Rejected)


def test_an_adapter_is_pinned_over_the_socket(served: tuple[Gateway, Gateway]) -> None:
    gateway, _ = served
    gateway.send(Credit(count=1))
    gateway.send(Pin(call_id="p", digest="a"))
    assert gateway.receive() == READY
    answer = gateway.receive()
    assert isinstance(answer, AdapterState)
    assert (answer.call_id, answer.state, answer.num_pages) == ("p", "resident", 2)
    gateway.send(StatsRequest(call_id="s"))
    stats = gateway.receive()
    assert [(one.digest, one.is_pinned) for one in getattr(stats, "adapters", ())] == [("a", True)]


def test_sequences_of_a_dead_gateway_end_even_without_a_failed_send(
    served: tuple[Gateway, Gateway], simulation: Simulation
) -> None:
    gone, staying = served
    # Without credit, the gateway's tokens stay in the engine, so no failed send reveals that the gateway is gone.
    gone.send(simulation.make_add("same", (1, 2, 3), 500))
    assert gone.receive() == READY
    staying.send(Credit(count=1000))
    add = simulation.make_add("same", (4, 5, 6), 400)
    staying.send(add)
    assert staying.receive() == READY
    gone.die()
    tokens: list[int] = []
    while not isinstance(message := staying.receive(), Finished):
        assert isinstance(message, StepOutput)
        assert len(message.outputs) == 1, "only its own output"
        tokens.extend(message.outputs[0].token_ids)
    assert tokens == simulation.expected(add)
    deadline = time.monotonic() + 10
    while (stats := num_held(staying)) != (0, 0):
        assert time.monotonic() < deadline, stats
        time.sleep(0.05)


def num_held(gateway: Gateway) -> tuple[int, int]:
    gateway.send(StatsRequest(call_id="s"))
    stats = gateway.receive()
    assert isinstance(stats, Stats)
    return stats.num_running, stats.num_waiting


def test_only_stats_requests_with_tiers_wait_for_a_look(served: tuple[Gateway, Gateway], stager: Stager) -> None:
    looking, other = served
    for number in (1, 2):
        looking.send(StatsRequest(call_id=f"look {number}", with_tiers=True))
        other.send(StatsRequest(call_id=f"plain {number}"))
        if number == 1:
            assert looking.receive() == other.receive() == READY
        plain = other.receive()
        assert isinstance(plain, Stats)
        assert plain.call_id == f"plain {number}"
        while not stager.looks:
            time.sleep(0.001)
        os.write(stager.write, b"x")
        looked = looking.receive()
        assert isinstance(looked, Stats)
        assert looked.call_id == f"look {number}"
        assert stager.num_pipes == number + 1, "the new pipe is polled"
