from __future__ import annotations

import asyncio
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq.asyncio

from loramux.admin.server.listeners import bind
from loramux.engine.protocol.messages import (
    Add,
    Credit,
    EngineReady,
    Finished,
    FromEngine,
    Load,
    Pin,
    SequenceOutput,
    StatsRequest,
    StepOutput,
    Unload,
)
from loramux.platform.cluster import tunnel
from loramux.platform.cluster.tunnel import TunnelTransport
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.engine_link.followed_engine import Joining
from loramux.platform.replicas import frame_link, framed_connection
from loramux.platform.replicas.certificates import (
    LIFETIME_S,
    SETTLE_S,
    OwnCertificate,
    OwnCertificates,
    PublishedCertificate,
    read_certificates,
    tls_context,
)
from loramux.platform.replicas.frame_link import FrameLink
from loramux.platform.replicas.framed_connection import FramedConnection
from loramux.platform.replicas.peer_connection import PeerConnection
from loramux.platform.replicas.peer_engine import PeerEngine
from loramux.platform.replicas.peer_listener import PeerListener
from loramux.platform.replicas.peer_relay import MAX_EARLY_FRAMES, PeerRelay
from loramux.platform.replicas.records import base_fingerprint
from loramux.platform.replicas.replica_book import Peer
from tests.platform.replicas.lab import add, bound, collect, own_row, until
from tests.platform.replicas.served_engine import ServedEngine
from tests.platform.scripted_engine import Script, ScriptedEngine, echo

pytestmark = pytest.mark.anyio


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A listening server, and the certificate of the only server that it accepts."""

    served: ServedEngine
    listener: PeerListener
    port: int
    own: OwnCertificates
    friend: OwnCertificates
    refusals: Counter[str]

    @property
    def certificates(self) -> tuple[PublishedCertificate, ...]:
        return read_certificates("rep_a", self.own.pem)

    async def connect(self, presented: OwnCertificate | None = None) -> PeerConnection:
        own = self.friend.in_use if presented is None else presented
        return await PeerConnection.open("127.0.0.1", self.port, own, self.certificates, lambda *_: None, 60.0)

    def engine(self) -> PeerEngine:
        assert self.served.engine.info is not None
        row = own_row("rep_a", self.served.engine, address=f"127.0.0.1:{self.port}")
        peer = Peer(row=row, certificates=self.certificates, holds=frozenset(), since_s=0.0)
        return PeerEngine(peer, lambda: self.friend.in_use, Joining(first_delay_s=0.01, max_delay_s=0.02))


@asynccontextmanager
async def listening(directory: Path, friend: OwnCertificates | None = None) -> AsyncIterator[Side]:
    served = ServedEngine(ScriptedEngine(), directory / "engine.sock")
    refusals: Counter[str] = Counter()
    socket = bound()
    listener = PeerListener(socket, served, lambda reason: refusals.update([reason]))
    side = Side(
        served=served,
        listener=listener,
        port=socket.getsockname()[1],
        own=OwnCertificates("rep_a"),
        friend=friend or OwnCertificates("rep_b"),
        refusals=refusals,
    )
    listener.accept_from(side.own.in_use, {"rep_b": read_certificates("rep_b", side.friend.pem)})
    listener.start()
    try:
        yield side
    finally:
        await listener.close()
        served.close()


async def test_peer_runs_what_a_gateway_runs(short_path: Path) -> None:
    async with listening(short_path) as side:
        connection = await side.connect()
        assert connection.info == side.served.engine.info
        assert (await collect(connection.submit(add("one", 200))))[0] == [5, 6, 7] * 66 + [5, 6]
        assert (await connection.call(Load(digest="ab" * 32), 5.0)).state == "resident"
        assert [one.digest for one in (await connection.call(StatsRequest(), 5.0)).adapters] == ["ab" * 32]
        # Another connection of the same server has its own sequences.
        second = await side.connect()
        both = await asyncio.gather(*(collect(one.submit(add("two"))) for one in (connection, second)))
        assert both[0] == both[1]
        with pytest.raises(EngineUnavailable):
            await side.connect()
        assert side.refusals == {"connections": 1}
        for one in (connection, second):
            one.close(frozenset())


async def test_next_server_can_bind_the_port_while_old_connections_linger(short_path: Path) -> None:
    async with listening(short_path) as side:
        # The server closes this connection first, so the connection lingers as a killed server's connections do.
        side.listener.accept_from(side.own.in_use, {})
        reader, writer = await asyncio.open_connection("127.0.0.1", side.port)
        assert await reader.read() == b""
        await side.listener.close()
        bind("127.0.0.1", side.port, "peer_address").close()
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("who", ["a stranger", "an expired friend", "plain text"])
async def test_only_a_valid_certificate_in_the_table_is_accepted(who: str, short_path: Path) -> None:
    long_ago = datetime.now(UTC) - timedelta(seconds=LIFETIME_S + 60)
    friend = OwnCertificates("rep_b", lambda: long_ago) if who == "an expired friend" else OwnCertificates("rep_b")
    async with listening(short_path, friend) as side:
        if who == "plain text":
            reader, writer = await asyncio.open_connection("127.0.0.1", side.port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            # The server closes or resets the connection, depending on how much it has read.
            with suppress(ConnectionError):
                await reader.read()
            writer.close()
        else:
            presented = OwnCertificates("rep_b").in_use if who == "a stranger" else friend.in_use
            with pytest.raises(EngineUnavailable):
                await side.connect(presented)
        await until(lambda: side.refusals["handshake"] == 1)
        assert not side.served.engine.adds


async def test_server_that_cannot_prove_its_certificate_is_not_used(short_path: Path) -> None:
    async with listening(short_path) as side:
        other = read_certificates("rep_a", OwnCertificates("rep_a").pem)
        with pytest.raises(EngineUnavailable):
            await PeerConnection.open("127.0.0.1", side.port, side.friend.in_use, other, lambda *_: None, 5.0)


def framed(message: object) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4) + data


HOSTILE: Mapping[str, bytes] = {
    "a huge frame": b"\xff\xff\xff\xff",
    "noise": (5).to_bytes(4) + b"noise",
    "an unload": framed(Unload(call_id="1", digest="ab" * 32)),
    "a pin": framed(Pin(call_id="1", digest="ab" * 32)),
    "too much credit": framed(Credit(count=1 << 40)),
    "negative credit": framed(Credit(count=-1)),
    "an engine's message": framed(EngineReady(max_model_len=1, num_pages=1, page_tokens=1, device="", dtype="")),
    "a sequence twice": framed(add("same", 50)) * 2,
}


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
async def test_hostile_bytes_end_their_connection_and_nothing_else(sent: bytes, short_path: Path) -> None:
    async with listening(short_path) as side:
        side.served.engine.script = lambda one: Script(token_ids=(7,) * one.max_tokens, delay_s=0.001)
        good = await side.connect()
        stream = good.submit(add("good", 100))
        assert isinstance(await anext(stream), SequenceOutput)
        link = FrameLink(lambda frame: None)
        context = tls_context(ssl.PROTOCOL_TLS_CLIENT, side.friend.in_use, side.certificates)
        transport, _ = await asyncio.get_running_loop().create_connection(
            lambda: link, "127.0.0.1", side.port, ssl=context
        )
        transport.write(sent)
        async with asyncio.timeout(30):
            await link.lost
        assert (await collect(stream))[1].reason == "length"
        good.close(frozenset())


async def test_dead_engine_tells_which_sequences_ran(short_path: Path) -> None:
    async with listening(short_path) as side:
        side.served.engine.script = lambda one: Script(
            token_ids=(7,) * 9, stall_after=1 if "runs" in one.sequence_id else 0
        )
        engine = side.engine()
        engine.follow()
        await until(lambda: engine.is_ready)
        streams = [engine.submit(add(name)) for name in ("runs", "waits")]
        assert isinstance(await anext(streams[0]), SequenceOutput)
        await until(lambda: len(side.served.engine.adds) == 2)
        side.served.die(ran=frozenset({"runs"}))
        ends = [(await collect(stream))[1] for stream in streams]
        assert [(end.code, end.prompt_tokens) for end in ends] == [("engine_unavailable", 3), ("engine_unavailable", 0)]
        await until(lambda: not engine.is_ready)
        side.served.revive()
        await until(lambda: engine.is_ready)
        side.served.engine.script = echo
        assert (await collect(engine.submit(add("next"))))[1].reason == "length"
        await engine.close()


@pytest.mark.parametrize(
    "claim",
    [
        {"base": base_fingerprint(EngineReady(max_model_len=1, num_pages=1, page_tokens=1, device="", dtype=""))},
        {"base_id": "b" * 64},
        {"base_id": None},
    ],
    ids=["another dtype", "another base", "no base"],
)
async def test_row_that_lies_about_its_base_is_not_joined(short_path: Path, claim: dict[str, Any]) -> None:
    async with listening(short_path) as side:
        engine = side.engine()
        engine.peer = replace(engine.peer, row=msgspec.structs.replace(engine.peer.row, **claim))
        engine.follow()
        await until(lambda: engine.trouble is not None)
        assert "a different base" in str(engine.trouble)
        assert not engine.is_ready
        await engine.close()


async def test_flood_before_the_certificate_is_checked_ends_the_connection(short_path: Path) -> None:
    async with listening(short_path) as side:
        link = PeerRelay(zmq.asyncio.Context.instance(), side.served).link
        link.data_received(framed(Credit(count=1)) * MAX_EARLY_FRAMES)
        assert not link.lost.done()
        link.data_received(framed(Credit(count=1)))
        assert "too much" in link.lost.result()


async def test_big_answers_wait_for_a_peer_that_reads_slowly(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_link, "MAX_UNSENT_BYTES", 1 << 20)
    monkeypatch.setattr(tunnel, "PAUSE_BYTES", 1 << 16)

    def enlarged(message: FromEngine) -> tuple[FromEngine, ...]:
        if not isinstance(message, StepOutput):
            return (message,)
        return (
            StepOutput(outputs=tuple(msgspec.structs.replace(one, pooled=bytes(1 << 18)) for one in message.outputs)),
        )

    async with listening(short_path) as side:
        side.served.rewrite = enlarged
        relay = PeerRelay(zmq.asyncio.Context.instance(), side.served)
        transport = TunnelTransport(relay.link)
        running = asyncio.create_task(relay.run())
        transport.receive(framed(Credit(count=64)) + framed(add("one", 20)))
        engine = side.served.engine
        await until(lambda: len(engine.adds) == 1 and engine.num_running == 0)
        messages: list[FromEngine] = []
        decoder = msgspec.msgpack.Decoder(FromEngine)
        reader = FrameLink(lambda frame: messages.append(decoder.decode(frame)))
        async with asyncio.timeout(30):
            while not isinstance(messages[-1] if messages else None, Finished):
                data = await transport.take()
                assert data, relay.link.lost
                reader.data_received(data)
        assert sum(isinstance(message, StepOutput) for message in messages) == 20
        relay.end("the test is over")
        transport.lose()
        await running


async def test_deaths_before_a_client_closes_count_at_once(short_path: Path) -> None:
    async with listening(short_path) as side:
        engine = side.engine()
        one = add("one")
        code = "engine_unavailable"
        end = Finished(sequence_id="one", reason="error", prompt_tokens=3, completion_tokens=0, code=code)
        engine._note_end(one, end)
        await engine.close()
        assert (len(engine._strikes), engine._striking) == (1, None)


async def test_sequences_that_arrive_after_the_engines_loss_are_refused(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that reads slowly delays the end of the connection, and the next engine may be running by then."""
    monkeypatch.setattr(tunnel, "PAUSE_BYTES", 1 << 10)
    async with listening(short_path) as side:
        engine = side.served.engine
        engine.script = lambda add: Script(token_ids=(7,) * 4000, tokens_per_output=2000, stall_after=2000)
        relay = PeerRelay(zmq.asyncio.Context.instance(), side.served)
        transport = TunnelTransport(relay.link)
        running = asyncio.create_task(relay.run())
        transport.receive(framed(Credit(count=64)) + framed(add("one", 4000)))
        await until(lambda: transport.get_write_buffer_size() > 1 << 10)
        side.served.die(ran=frozenset({"one"}))
        await until(lambda: relay._refuses_new)
        side.served.revive()
        transport.receive(framed(add("late")))
        ends: dict[str, str | None] = {}
        decoder = msgspec.msgpack.Decoder(FromEngine)

        def note(frame: bytes) -> None:
            message = decoder.decode(frame)
            if isinstance(message, Finished):
                ends[message.sequence_id] = message.code

        reader = FrameLink(note)
        async with asyncio.timeout(30):
            while data := await transport.take():
                reader.data_received(data)
            await running
        assert ends == {"late": "replica_draining", "one": "engine_unavailable"}
        assert [one.sequence_id for one in engine.adds] == ["one"]


async def test_requests_that_a_connection_has_no_room_for_are_refused_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(framed_connection, "MAX_WAITING_BYTES", 1 << 18)
    connection = FramedConnection(lambda *_: None)
    transport = TunnelTransport(connection._link)
    streams = [connection.submit(add(f"{number}", grammar="x" * (1 << 17))) for number in range(4)]
    assert list(connection.open_adds) == ["0", "1"]
    assert (await collect(streams[-1]))[1].code == "overloaded"
    while transport.get_write_buffer_size():
        await transport.take()
    connection.submit(add("again"))
    assert list(connection.open_adds) == ["0", "1", "again"]
    connection.close(frozenset())


async def test_silent_peer_is_given_up(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_link, "PULSE_S", 0.005)
    async with listening(short_path) as side:
        context = tls_context(ssl.PROTOCOL_TLS_CLIENT, side.friend.in_use, side.certificates)
        reader, writer = await asyncio.open_connection("127.0.0.1", side.port, ssl=context)
        assert await reader.readexactly(4) == b"\0" * 4, "the other server's pulses arrive"
        async with asyncio.timeout(30):
            with suppress(ConnectionError):
                await reader.read()
        writer.close()
        await until(lambda: not side.listener._relays)


async def test_deleted_row_ends_the_connection(short_path: Path) -> None:
    async with listening(short_path) as side:
        connection = await side.connect()
        side.listener.end_all_but(frozenset({"rep_b"}))
        assert (await collect(connection.submit(add("still"))))[1].reason == "length"
        side.listener.end_all_but(frozenset())
        async with asyncio.timeout(30):
            await connection.wait_lost()
        connection.close(frozenset())


async def test_renewed_certificate_is_used_once_it_is_known(short_path: Path) -> None:
    clock_s = 0.0
    friend = OwnCertificates("rep_b", clock=lambda: clock_s)
    first = friend.in_use
    assert not friend.renew_if_due()
    clock_s = LIFETIME_S / 2
    assert friend.renew_if_due()
    assert len(read_certificates("rep_b", friend.pem)) == 2
    assert friend.in_use == first
    clock_s += SETTLE_S
    assert friend.in_use != first
    async with listening(short_path, friend) as side:
        for presented in (first, friend.in_use):
            connection = await side.connect(presented)
            connection.close(frozenset())
            await until(lambda: not side.listener._relays)
    clock_s = LIFETIME_S
    assert friend.renew_if_due()
    assert len(read_certificates("rep_b", friend.pem)) == 2


def test_messages_of_a_full_request_fit_a_frame() -> None:
    longest = Add(**{**msgspec.structs.asdict(add("x" * 64)), "prompt": tuple(range(1 << 20))})
    assert len(msgspec.msgpack.encode(longest)) < frame_link.MAX_FRAME_BYTES
