from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable
from contextlib import ExitStack, suppress
from http.client import HTTPResponse

import httpx
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config

from loramux.admin.server.bounded_connection import (
    HEAD_TIMEOUT_S,
    MAX_JOINED_BYTES,
    READER_TIMEOUT_S,
    STALL_S,
    BoundedConnection,
    JoinedWrites,
)
from loramux.admin.server.connection_limits import KEEP_ALIVE_S, ConnectionLimits
from loramux.admin.server.connection_registry import ConnectionRegistry
from loramux.admin.server.listeners import MAX_UNSENT_BYTES
from loramux.platform.requests.sse import EventStream
from tests.admin.server.bounded_listener import HELLO, PARTS, WAIT_S, answer, is_closed, is_open, listening
from tests.adversary.socket_flood import Attack, Target, flood, idle, request, slow_body, slow_head


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="idle"),
        pytest.param(b"GET / HTTP/1.1\r\nhost: x\r\nx-slow: ", id="slow head"),
        pytest.param(HELLO + b"GET / HTTP/1.1\r\nhost", id="slow head after an answer"),
    ],
)
def test_connection_without_a_complete_request_is_closed(sent: bytes) -> None:
    with listening() as listener, listener.open(sent) as connection:
        if sent.startswith(HELLO):
            assert answer(connection)[0] == 200
        else:
            listener.wait_until(lambda: len(listener.book.connections) == 1)
        listener.sweep_later(HEAD_TIMEOUT_S / 2)
        connection.sendall(b"x")
        listener.sweep_later(HEAD_TIMEOUT_S + 1)
        assert is_closed(connection)
        assert listener.num_refused("no_request") == 1


def test_offer_to_upgrade_is_ignored_without_advice_to_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "warning", said.append)
    offer = HELLO.replace(b"\r\n\r\n", b"\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
    with listening() as listener, listener.open(offer) as connection:
        assert answer(connection)[0] == 200
    assert said == []


def test_connection_stays_open_between_requests() -> None:
    with listening() as listener, listener.open(HELLO) as connection:
        assert answer(connection)[0] == 200
        listener.sweep_later(KEEP_ALIVE_S - 1)
        listener.make_older(KEEP_ALIVE_S - 1)
        # The time for a request head begins with its first byte.
        connection.sendall(HELLO[:5])
        listener.wait_until(lambda: not any(one._waits_for_request for one in listener.book._members))  # type: ignore[attr-defined]
        listener.sweep_later(HEAD_TIMEOUT_S / 2)
        connection.sendall(HELLO[5:])
        assert answer(connection)[0] == 200
        assert listener.num_refused("no_request") == 0


def test_connection_is_closed_after_the_keep_alive_time() -> None:
    with listening(keep_alive_s=1) as listener, listener.open(HELLO) as connection:
        assert answer(connection)[0] == 200
        assert connection.recv(1) == b""
        assert listener.num_refused("no_request") == 0


@pytest.mark.parametrize("path", ["/", "/endless"])
def test_closed_connection_is_freed_without_a_garbage_collection(path: str) -> None:
    gc.disable()
    try:
        with listening() as listener:
            connection = listener.open(request("GET", path, {}))
            assert connection.recv(1)
            [member] = listener.book._members
            is_there = weakref.ref(member)
            del member
            connection.close()
            listener.wait_until(lambda: is_there() is None)
    finally:
        gc.enable()


def test_byte_now_and_then_does_not_prolong_a_request_head() -> None:
    with listening() as listener, listener.open(HELLO) as connection:
        assert answer(connection)[0] == 200
        connection.sendall(HELLO[:5])
        listener.wait_until(lambda: not any(one._waits_for_request for one in listener.book._members))  # type: ignore[attr-defined]
        listener.make_older(HEAD_TIMEOUT_S / 2)
        connection.sendall(HELLO[5:6])
        listener.sweep_later(HEAD_TIMEOUT_S / 2 + 1)
        assert is_closed(connection)
        assert listener.num_refused("no_request") == 1


def test_listener_sweeps_connections_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.admin.server.bounded_connection.HEAD_TIMEOUT_S", 0.0)
    with listening() as listener, listener.open() as connection:
        assert connection.recv(1) == b""


def test_running_request_has_no_deadline() -> None:
    with listening() as listener, listener.open(request("GET", "/wait", {})) as connection:
        listener.wait_until(lambda: listener.num_waiting == 1)
        listener.sweep_later(10_000)
        listener.call(listener.may_end.set)
        assert answer(connection)[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(request("GET", "/endless", {}), id="stream"),
        pytest.param(request("GET", "/large", {}), id="one large answer"),
        # The server has finished. Only the data in its send buffer remains.
        pytest.param(request("GET", "/large", {"connection": "close"}), id="the last answer"),
    ],
)
def test_client_that_reads_nothing_is_cut_off(sent: bytes) -> None:
    with listening() as listener, listener.open(sent) as connection:
        listener.wait_until(lambda: any(one.flow.write_paused for one in listener.book._members))  # type: ignore[attr-defined]
        listener.sweep_later(READER_TIMEOUT_S / 2)
        assert len(listener.book.connections) == 1
        listener.sweep_later(READER_TIMEOUT_S + 1)
        listener.wait_until(lambda: not listener.book.connections)
        assert listener.num_refused("slow_reader") == 1
        assert is_closed(connection)
        if b"/endless" in sent:
            listener.wait_until(lambda: listener.num_left == 1)


def test_client_that_reads_nothing_uses_little_kernel_memory() -> None:
    with listening() as listener, listener.open(request("GET", "/endless", {})):
        listener.wait_until(lambda: any(one.flow.write_paused for one in listener.book._members))  # type: ignore[attr-defined]
        assert 0 < listener.num_endless_bytes <= 2 * (MAX_UNSENT_BYTES + 65536)


def test_pipelined_requests_wait_until_the_previous_response_is_read() -> None:
    sent = request("GET", "/large", {}) * 2 + request("GET", "/", {"connection": "close"})
    with listening() as listener, listener.open(sent) as connection:
        listener.wait_until(lambda: any(one.flow.write_paused for one in listener.book._members))  # type: ignore[attr-defined]
        # Without the limit, the server would read the next request in the next loop iteration.
        listener.call(lambda: None)
        assert listener.num_asked == 1
        received = b"".join(iter(lambda: connection.recv(1 << 20), b""))
        assert received.count(b"HTTP/1.1 200 OK") == listener.num_asked == 3


IN_CHUNKS = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in PARTS if part) + b"0\r\n\r\n"


@pytest.mark.parametrize(
    ("method", "version", "body"),
    [
        pytest.param("GET", "1.1", IN_CHUNKS, id="in chunks"),
        pytest.param("GET", "1.0", b"".join(PARTS), id="until the connection closes"),
        pytest.param("HEAD", "1.1", b"", id="without a body"),
    ],
)
def test_streamed_parts_are_sent_as_the_request_allows(method: str, version: str, body: bytes) -> None:
    sent = request(method, "/parts", {"connection": "close"}).replace(b"HTTP/1.1", b"HTTP/" + version.encode(), 1)
    with listening() as listener, listener.open(sent) as connection:
        received = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    head, _, sent_body = received.partition(b"\r\n\r\n")
    assert (head.startswith(b"HTTP/1.1 200 OK"), sent_body) == (True, body)


def test_head_of_a_stream_does_not_wait_for_a_late_part() -> None:
    with listening() as listener, listener.open(request("GET", "/late", {})) as connection:
        received = connection.recv(65536)
        assert received.startswith(b"HTTP/1.1 200 ")
        assert received.endswith(b"\r\n\r\n")
        listener.call(listener.may_end.set)
        assert connection.recv(65536).startswith(b"4\r\nlate\r\n")


class WrittenTo(asyncio.Transport):
    """A transport that records each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        return

    def resume_reading(self) -> None:
        return

    def close(self) -> None:
        return

    def is_closing(self) -> bool:
        return False


async def send_whole(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("hello")(scope, receive, send)


async def send_stream(scope: Scope, receive: Receive, send: Send) -> None:
    async def events() -> AsyncIterator[bytes]:
        yield b"one"
        yield b"two"

    await EventStream(events(), {})(scope, receive, send)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("app", "num_writes"), [pytest.param(send_whole, 1, id="whole"), pytest.param(send_stream, 3, id="stream")]
)
async def test_head_is_written_together_with_the_first_part_of_the_body(app: ASGIApp, num_writes: int) -> None:
    config = Config(app, http=BoundedConnection, lifespan="off", ws="none", log_config=None, proxy_headers=False)
    config.load()
    registry, transport = ConnectionRegistry(), WrittenTo()
    connection = BoundedConnection(config, registry, {})
    connection.connection_made(transport)
    connection.data_received(HELLO)
    await asyncio.wait(registry.tasks)
    connection.connection_lost(None)
    writes = [data for data in transport.writes if data]
    assert len(writes) == num_writes
    assert writes[0].startswith(b"HTTP/1.1 200 ")
    assert writes[0].endswith(b"hello" if num_writes == 1 else b"\r\n\r\n3\r\none\r\n")


def test_large_part_is_not_copied_to_join_it() -> None:
    transport, large = WrittenTo(), b"x" * (MAX_JOINED_BYTES + 1)
    answer = JoinedWrites(transport)
    answer.hold()
    for part in (b"head", b"body", large, b"end"):
        answer.write(part)
    answer.flush()
    assert transport.writes == [b"headbody", large, b"end"]
    assert transport.writes[1] is large


def test_answer_to_a_client_that_has_left_logs_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging.getLogger("asyncio"), "error", lambda message, **_: said.append(message))
    with listening() as listener:
        with listener.open(request("GET", "/wait", {})):
            listener.wait_until(lambda: listener.num_waiting == 1)
        listener.wait_until(lambda: not listener.book.connections)
        listener.call(listener.may_end.set)
        listener.wait_until(lambda: listener.num_waiting == 0)
        # What the answer left for the event loop's next turn runs before this.
        listener.call(lambda: None)
    assert said == []


def test_streams_can_be_pipelined() -> None:
    sent = request("GET", "/parts", {}) * 3 + request("GET", "/", {"connection": "close"})
    with listening() as listener, listener.open(sent) as connection:
        received = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    assert (received.count(b"HTTP/1.1 200 OK"), received.count(b"\r\n\r\n" + IN_CHUNKS)) == (4, 3)


def test_slow_but_steady_reader_gets_the_whole_response() -> None:
    with listening() as listener, listener.open(request("GET", "/large", {"connection": "close"})) as connection:
        num_bytes, num_sweeps = 0, 0
        while chunk := connection.recv(1 << 20):
            num_bytes += len(chunk)
            if num_bytes > num_sweeps * 1_000_000:
                num_sweeps += 1
                # The interval between sweeps is shorter than the reader timeout.
                listener.sweep_later(num_sweeps * READER_TIMEOUT_S / 2)
        assert num_bytes > 8_000_000
        assert num_sweeps >= 8
        assert listener.num_refused("slow_reader") == 0


def test_oldest_idle_connection_is_closed_for_a_new_one() -> None:
    limits = ConnectionLimits(max_connections=8, max_per_address=8)
    with listening(limits) as listener, ExitStack() as stack:
        first, *others = [stack.enter_context(listener.open()) for _ in range(8)]
        listener.wait_until(lambda: len(listener.book.connections) == 8)
        assert answer(stack.enter_context(listener.open(HELLO)))[0] == 200
        assert is_closed(first)
        assert all(is_open(one) for one in others)
        assert listener.num_refused("shed") == 1


def test_flood_from_one_address_closes_no_connection_of_another() -> None:
    with listening(ConnectionLimits(max_connections=12, max_per_address=8)) as listener, ExitStack() as stack:
        polite = [stack.enter_context(listener.open()) for _ in range(3)]
        for source in ("127.0.0.2", "127.0.0.3"):
            for _ in range(40):
                stack.enter_context(listener.open(source=source))
        last = stack.enter_context(listener.open(HELLO, source="127.0.0.4"))
        assert answer(last)[0] == 200
        assert len(listener.book.connections) <= 12
        assert all(is_open(one) for one in polite)


def test_connections_without_any_request_are_closed_first() -> None:
    with listening(ConnectionLimits(max_connections=4, max_per_address=4)) as listener, ExitStack() as stack:
        kept = [stack.enter_context(listener.open(HELLO)) for _ in range(3)]
        assert [answer(one)[0] for one in kept] == [200] * 3
        silent = stack.enter_context(listener.open())
        listener.wait_until(lambda: len(listener.book.connections) == 4)
        listener.make_older(STALL_S)
        assert answer(stack.enter_context(listener.open(HELLO)))[0] == 200
        assert is_closed(silent)
        kept[0].sendall(HELLO)
        assert answer(kept[0])[0] == 200


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        pytest.param(ConnectionLimits(max_connections=3, max_per_address=9), "listener_full", id="in all"),
        pytest.param(ConnectionLimits(max_connections=9, max_per_address=3), "address_full", id="of one address"),
    ],
)
def test_connections_waiting_for_a_response_are_not_closed(limits: ConnectionLimits, reason: str) -> None:
    with listening(limits) as listener, ExitStack() as stack:
        asking = [stack.enter_context(listener.open(request("GET", "/wait", {}))) for _ in range(3)]
        listener.wait_until(lambda: listener.num_waiting == 3)
        refused = stack.enter_context(listener.open())
        response = HTTPResponse(refused)
        response.begin()
        assert (response.status, int(response.headers["retry-after"])) == (503, 1)
        assert json.loads(response.read())["error"]["code"] == "too_many_connections"
        assert listener.num_refused(reason) == 1
        listener.call(listener.may_end.set)
        assert [answer(one)[0] for one in asking] == [200] * 3
        assert answer(stack.enter_context(listener.open(HELLO)))[0] == 200


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(request("POST", "/", {}, b"x" * 10)[:-5], id="slow body"),
        pytest.param(request("GET", "/endless", {}), id="slow reader"),
    ],
)
def test_client_that_stalls_its_own_request_is_closed(sent: bytes) -> None:
    with listening(ConnectionLimits(max_connections=2, max_per_address=2)) as listener, ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(listener.open(sent))

        def are_stalled() -> bool:
            now_s = listener.loop.time() + STALL_S
            return [one.shed_rank(now_s) for one in list(listener.book._members)] == [2, 2]

        listener.wait_until(are_stalled)

        listener.make_older(STALL_S)
        assert answer(stack.enter_context(listener.open(HELLO)))[0] == 200
        assert listener.num_refused("shed") == 1


def test_new_connection_is_not_closed_before_stalled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine, the new connection may be older than STALL_S when the next one arrives.
    stall_s = 3600.0
    monkeypatch.setattr("loramux.admin.server.bounded_connection.STALL_S", stall_s)
    with listening(ConnectionLimits(max_connections=4, max_per_address=4)) as listener, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(listener.open(request("POST", "/", {}, b"x" * 10)[:-5]))
        listener.wait_until(lambda: listener.num_waiting == 3)
        listener.make_older(stall_s)
        polite = stack.enter_context(listener.open())
        listener.wait_until(lambda: len(listener.book.connections) == 4)
        stack.enter_context(listener.open())
        listener.wait_until(lambda: listener.num_refused("shed") == 1)
        polite.sendall(HELLO)
        assert answer(polite)[0] == 200


def test_closed_connections_free_their_places() -> None:
    with listening(ConnectionLimits(max_connections=4, max_per_address=4)) as listener:
        for _ in range(5):
            with ExitStack() as stack:
                for _ in range(4):
                    assert answer(stack.enter_context(listener.open(HELLO)))[0] == 200
            listener.wait_until(lambda: not listener.book.connections)
        assert not listener.book._members
        assert not listener.book._members_of
        assert {listener.num_refused(reason) for reason in ("shed", "listener_full", "address_full")} == {0}


@pytest.mark.anyio
async def test_polite_client_is_served_during_attacks() -> None:
    limits = ConnectionLimits(max_connections=64, max_per_address=64)
    with listening(limits) as listener:
        target = Target(host="127.0.0.1", port=listener.port)
        num_begun, are_accepted = 0, asyncio.Event()

        def for_a_second(attack: Attack) -> Attack:
            """The attack for a second, and until the server has accepted all connections."""

            async def hold(connection: socket.socket) -> None:
                # A TimeoutError is an OSError.
                with suppress(OSError):
                    async with asyncio.timeout(1.0):
                        await attack(connection)
                await are_accepted.wait()

            def begin(connection: socket.socket) -> Awaitable[None]:
                nonlocal num_begun
                num_begun += 1
                return hold(connection)

            return begin

        attacks = map(for_a_second, [idle, slow_head(), slow_body("/", {})])
        under_attack = [asyncio.create_task(flood(target, attack, 60, hold_s=WAIT_S)) for attack in attacks]
        statuses = []
        url = f"http://127.0.0.1:{listener.port}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=WAIT_S) as http:
            while not (statuses and all(task.done() for task in under_attack)):
                have_all_begun = num_begun == 3 * 60
                # If this process sends its request late, its connection looks idle, too.
                with suppress(httpx.RemoteProtocolError, httpx.ReadError):
                    statuses.append((await http.get("/", headers={"connection": "close"})).status_code)
                    # The server accepts connections in their order.
                    if have_all_begun:
                        are_accepted.set()
        counts = [task.result() for task in under_attack]
        assert set(statuses) == {200}
        assert sum(one.held for one in counts) <= 64
        assert sum(one.closed for one in counts) >= 3 * 60 - 64
        listener.wait_until(lambda: not listener.book.connections)
