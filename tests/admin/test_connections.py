"""A listener whose connections are bounded, whoever opens them and however slowly they speak."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest
import uvloop
from prometheus_client.parser import text_string_to_metric_families

from loramux.admin.bounded_connection import HEAD_TIMEOUT_S, READER_TIMEOUT_S, STALL_S
from loramux.admin.client_addresses import TrustedProxies, origin_of
from loramux.admin.connection_book import ConnectionBook
from loramux.admin.connection_limits import MAX_ADMIN_CONNECTIONS, RESERVED_DESCRIPTORS, ConnectionLimits
from loramux.admin.http_servers import HttpServer
from loramux.admin.listeners import MAX_UNSENT_BYTES, bind
from loramux.platform.metrics import GatewayMetrics
from tests.adversary.socket_flood import Target, flood, idle, request, slow_body, slow_head

HELLO = request("GET", "/", {})


@dataclass
class Listener:
    """A small app on a real listener, as `loramux serve` has it."""

    port: int
    book: ConnectionBook
    metrics: GatewayMetrics
    loop: Any = None
    num_waiting: int = 0
    num_left: int = 0
    num_endless_bytes: int = 0
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """`/` says who calls; `/wait` answers when it may; `/endless` answers without end; a body is always read."""
        try:
            self.num_waiting += 1
            message: Any = {"more_body": True}
            while message.get("more_body"):
                message = await receive()
            if scope["path"] == "/wait":
                await self.may_end.wait()
            said = json.dumps([scope["client"][0], scope["scheme"]]).encode()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while scope["path"] == "/endless" and not (message := await self._left(receive)):
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                self.num_endless_bytes += 65536
            body = b"x" * 8_000_000 if scope["path"] == "/large" else said
            await send({"type": "http.response.body", "body": body})
        finally:
            self.num_waiting -= 1
            self.num_left += message["type"] == "http.disconnect"

    async def _left(self, receive: Any) -> Any:
        try:
            async with asyncio.timeout(0):
                return await receive()
        except TimeoutError:
            return None

    def call(self, function: Callable[[], None]) -> None:
        """Run it on the server's loop."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (function(), done.set()))
        assert done.wait(10)

    def sweep_later(self, seconds: float) -> None:
        """As if so much time had passed."""
        self.call(lambda: self.book.sweep(self.loop.time() + seconds))

    def make_older(self, seconds: float) -> None:
        """As if its clients had kept each connection waiting for so much longer."""

        def move() -> None:
            for one in self.book._members:
                one.since_s -= seconds

        self.call(move)

    def open(self, sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.bind((source, 0))
        connection.settimeout(10)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(sent)
        return connection

    def num_refused(self, reason: str) -> float:
        families = text_string_to_metric_families(self.metrics.render().decode())
        (family,) = (one for one in families if one.name == "loramux_network_refusals")
        (value,) = (one.value for one in family.samples if one.labels.get("reason") == reason and "total" in one.name)
        return value

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not is_so():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.005)


@contextmanager
def listening(limits: ConnectionLimits | None = None, proxies: tuple[str, ...] = ()) -> Iterator[Listener]:
    metrics = GatewayMetrics()
    bound = bind("127.0.0.1", 0, "port")
    listener = Listener(
        bound.getsockname()[1], ConnectionBook(limits, TrustedProxies(proxies), metrics, "openai"), metrics
    )
    server = HttpServer(listener, bound, listener.book)

    async def serve() -> None:
        listener.loop = asyncio.get_running_loop()
        await server.run_until_stopped()

    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    listener.wait_until(lambda: server.is_listening.is_set())
    try:
        yield listener
    finally:
        listener.call(listener.may_end.set)
        server.force_exit = True
        server.stop()
        thread.join(10)
        assert not thread.is_alive()


def answer(connection: socket.socket) -> tuple[int, bytes]:
    response = HTTPResponse(connection)
    response.begin()
    return response.status, response.read()


def is_open(connection: socket.socket) -> bool:
    """Whether the server has kept it; what it said before is thrown away."""
    connection.settimeout(0.1)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return True
    except OSError:
        return False
    return False


# Deadlines


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="idle"),
        pytest.param(b"GET / HTTP/1.1\r\nhost: x\r\nx-slow: ", id="slow head"),
        pytest.param(HELLO + b"GET / HTTP/1.1\r\nhost", id="slow head after an answer"),
    ],
)
def test_a_connection_without_a_request_ends(sent: bytes) -> None:
    with listening() as listener, listener.open(sent) as connection:
        if sent.startswith(HELLO):
            assert answer(connection)[0] == 200
        else:
            listener.wait_until(lambda: len(listener.book.connections) == 1)
        listener.sweep_later(HEAD_TIMEOUT_S / 2)
        connection.sendall(b"x")
        listener.sweep_later(HEAD_TIMEOUT_S + 1)
        assert not is_open(connection)
        assert listener.num_refused("no_request") == 1


def test_the_listener_looks_by_itself_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loramux.admin.bounded_connection.HEAD_TIMEOUT_S", 0.0)
    with listening() as listener, listener.open() as connection:
        connection.settimeout(5)
        assert connection.recv(1) == b""


def test_a_request_under_way_has_no_such_deadline() -> None:
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
        # The server has nothing more to say and has closed its side, but for what is in its buffer.
        pytest.param(request("GET", "/large", {"connection": "close"}), id="the last answer"),
    ],
)
def test_a_client_that_reads_nothing_is_cut_off(sent: bytes) -> None:
    with listening() as listener, listener.open(sent) as connection:

        def has_unread() -> bool:
            return any(one.transport.get_write_buffer_size() for one in listener.book.connections)

        listener.wait_until(has_unread)
        listener.sweep_later(READER_TIMEOUT_S / 2)
        assert len(listener.book.connections) == 1
        listener.sweep_later(READER_TIMEOUT_S + 1)
        listener.wait_until(lambda: not listener.book.connections)
        assert listener.num_refused("slow_reader") == 1
        assert not is_open(connection)
        if b"/endless" in sent:
            listener.wait_until(lambda: listener.num_left == 1)


def test_a_client_that_reads_nothing_takes_little_of_the_kernels_memory() -> None:
    with listening() as listener, listener.open(request("GET", "/endless", {})):
        listener.wait_until(lambda: any(one.flow.write_paused for one in listener.book._members))
        assert 0 < listener.num_endless_bytes <= 2 * (MAX_UNSENT_BYTES + 65536)


def test_a_client_that_reads_slowly_but_steadily_gets_everything() -> None:
    with listening() as listener, listener.open(request("GET", "/large", {"connection": "close"})) as connection:
        num_bytes, num_sweeps = 0, 0
        while chunk := connection.recv(1 << 20):
            num_bytes += len(chunk)
            if num_bytes > num_sweeps * 1_000_000:
                num_sweeps += 1
                # Each is later than the last, by less than a client may take.
                listener.sweep_later(num_sweeps * READER_TIMEOUT_S / 2)
        assert num_bytes > 8_000_000
        assert num_sweeps >= 8
        assert listener.num_refused("slow_reader") == 0


# Room


def test_idle_connections_give_way_to_a_newcomer_oldest_first() -> None:
    limits = ConnectionLimits(max_connections=8, max_per_address=8)
    with listening(limits) as listener, ExitStack() as stack:
        first, *others = [stack.enter_context(listener.open()) for _ in range(8)]
        listener.wait_until(lambda: len(listener.book.connections) == 8)
        assert answer(stack.enter_context(listener.open(HELLO)))[0] == 200
        assert not is_open(first)
        assert all(is_open(one) for one in others)
        assert listener.num_refused("shed") == 1


def test_a_flood_of_one_address_ends_no_connection_of_another() -> None:
    with listening(ConnectionLimits(max_connections=12, max_per_address=8)) as listener, ExitStack() as stack:
        polite = [stack.enter_context(listener.open()) for _ in range(3)]
        for source in ("127.0.0.2", "127.0.0.3"):
            for _ in range(40):
                stack.enter_context(listener.open(source=source))
        last = stack.enter_context(listener.open(HELLO, source="127.0.0.4"))
        assert answer(last)[0] == 200
        assert len(listener.book.connections) <= 12
        assert all(is_open(one) for one in polite)


def test_connections_that_never_asked_go_before_those_that_did() -> None:
    with listening(ConnectionLimits(max_connections=4, max_per_address=4)) as listener, ExitStack() as stack:
        kept = [stack.enter_context(listener.open(HELLO)) for _ in range(3)]
        assert [answer(one)[0] for one in kept] == [200] * 3
        silent = stack.enter_context(listener.open())
        listener.wait_until(lambda: len(listener.book.connections) == 4)
        listener.make_older(STALL_S)
        assert answer(stack.enter_context(listener.open(HELLO)))[0] == 200
        assert not is_open(silent)
        kept[0].sendall(HELLO)
        assert answer(kept[0])[0] == 200


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        pytest.param(ConnectionLimits(max_connections=3, max_per_address=9), "listener_full", id="in all"),
        pytest.param(ConnectionLimits(max_connections=9, max_per_address=3), "address_full", id="of one address"),
    ],
)
def test_nobody_gives_way_who_waits_for_an_answer(limits: ConnectionLimits, reason: str) -> None:
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
def test_a_client_that_keeps_its_own_request_waiting_gives_way(sent: bytes) -> None:
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


def test_a_new_connection_whose_request_is_on_its_way_is_not_the_first_to_go() -> None:
    with listening(ConnectionLimits(max_connections=4, max_per_address=4)) as listener, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(listener.open(request("POST", "/", {}, b"x" * 10)[:-5]))
        listener.wait_until(lambda: listener.num_waiting == 3)
        listener.make_older(STALL_S)
        polite = stack.enter_context(listener.open())
        listener.wait_until(lambda: len(listener.book.connections) == 4)
        stack.enter_context(listener.open())
        listener.wait_until(lambda: listener.num_refused("shed") == 1)
        polite.sendall(HELLO)
        assert answer(polite)[0] == 200


def test_the_places_of_connections_that_end_are_free_again() -> None:
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
async def test_attacks_beside_a_polite_client() -> None:
    limits = ConnectionLimits(max_connections=64, max_per_address=64)
    with listening(limits) as listener:
        target = Target(host="127.0.0.1", port=listener.port)
        attacks = [idle, slow_head(), slow_body("/", {})]
        under_attack = [asyncio.create_task(flood(target, attack, 60, hold_s=1.0)) for attack in attacks]
        statuses = []
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.port}", trust_env=False) as http:
            while not all(task.done() for task in under_attack):
                statuses.append((await http.get("/", headers={"connection": "close"})).status_code)
        counts = [task.result() for task in under_attack]
        assert set(statuses) == {200}
        assert sum(one.held for one in counts) <= 64
        assert sum(one.closed for one in counts) >= 3 * 60 - 64
        listener.wait_until(lambda: not listener.book.connections)


# Descriptors


def test_a_thousand_idle_sockets_leave_the_database_its_descriptors() -> None:
    with (
        subprocess.Popen(
            [sys.executable, "-m", "tests.admin.limited_server", str(RESERVED_DESCRIPTORS + 200)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        ) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)
        assert process.stdout is not None
        port = int(process.stdout.readline())
        for _ in range(1000):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http:
            for _ in range(20):
                answered = http.get("/", headers={"connection": "close"})
                assert (answered.status_code, answered.text) == (200, "rows: 1")


@pytest.mark.parametrize(
    ("soft", "hard", "said"),
    [
        pytest.param(256, None, f"{RESERVED_DESCRIPTORS + 1000 + MAX_ADMIN_CONNECTIONS} 1000 512", id="raised"),
        pytest.param(256, 1024, "1024 384 128", id="as far as it goes"),
        pytest.param(256, 512, "leaves no room for connections: raise the hard limit", id="refused"),
    ],
)
def test_the_limit_on_open_files_is_raised_at_start(soft: int, hard: int | None, said: str) -> None:
    program = f"""
import resource
from loramux.admin.connection_limits import make_room
from loramux.admin.errors import StartRefused
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard} or resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    limits = make_room(1000, 100)
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], limits.openai.max_connections, limits.admin.max_connections)
except StartRefused as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert said in done.stdout
    assert ("fewer connections than max_connections" in done.stdout) == (hard == 1024)


# Proxies


@pytest.mark.parametrize(
    ("forwarded_for", "client"),
    [
        pytest.param("198.51.100.7", "198.51.100.7", id="one"),
        pytest.param("203.0.113.9, 198.51.100.7", "198.51.100.7", id="the client's own claim is left of it"),
        pytest.param("198.51.100.7, 10.1.2.3", "198.51.100.7", id="two trusted proxies"),
        pytest.param("198.51.100.7:4711", "198.51.100.7", id="port"),
        pytest.param("[2001:db8::1]:4711", "2001:db8::1", id="IPv6 with port"),
        pytest.param("2001:db8::1", "2001:db8::1", id="IPv6"),
        pytest.param("::ffff:198.51.100.7", "198.51.100.7", id="mapped"),
        pytest.param("", "127.0.0.1", id="empty"),
        pytest.param("unknown", "127.0.0.1", id="no address"),
        pytest.param("198.51.100.7, unknown", "127.0.0.1", id="no address on the right"),
        pytest.param("unknown, 10.1.2.3", "10.1.2.3", id="no address behind a proxy"),
        pytest.param("fe80::1%" + "x" * 9000, "fe80::1", id="a long zone"),
        pytest.param("1" * 9000, "127.0.0.1", id="long"),
        pytest.param("'; DROP TABLE audit_log; --", "127.0.0.1", id="hostile"),
        pytest.param("10.9.9.9, 10.1.2.3", "10.9.9.9", id="proxies only"),
    ],
)
def test_a_trusted_proxys_word_about_its_client(forwarded_for: str, client: str) -> None:
    assert TrustedProxies(("127.0.0.1", "10.0.0.0/8")).client_of("127.0.0.1", forwarded_for) == client


@pytest.mark.parametrize(
    ("address", "origin"),
    [
        ("198.51.100.7", "198.51.100.7"),
        ("::ffff:198.51.100.7", "198.51.100.7"),
        ("2001:db8:0:1:2:3:4:5", "2001:db8:0:1::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_a_client_is_counted_by_what_it_cannot_change(address: str, origin: str) -> None:
    assert origin_of(address) == origin


@pytest.mark.parametrize(
    ("proxies", "seen"),
    [
        pytest.param((), ["127.0.0.1", "http"], id="nobody is believed"),
        pytest.param(("10.0.0.0/8",), ["127.0.0.1", "http"], id="another is believed"),
        pytest.param(("127.0.0.0/8",), ["198.51.100.7", "https"], id="believed"),
    ],
)
def test_only_named_proxies_are_believed(
    proxies: tuple[str, ...], seen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # uvicorn's own variable widens nothing.
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    told = {"x-forwarded-for": "203.0.113.9, 198.51.100.7", "x-forwarded-proto": "https"}
    with listening(proxies=proxies) as listener, listener.open(request("GET", "/", told)) as connection:
        assert json.loads(answer(connection)[1]) == seen


def test_behind_a_trusted_proxy_requests_are_counted_by_forwarded_address() -> None:
    limits = ConnectionLimits(max_connections=20, max_per_address=2)
    with listening(limits, ("127.0.0.1",)) as listener, ExitStack() as stack:

        def ask(client: str, path: str = "/") -> socket.socket:
            return stack.enter_context(listener.open(request("GET", path, {"x-forwarded-for": client})))

        asking = [ask("198.51.100.7", "/wait") for _ in range(2)]
        listener.wait_until(lambda: listener.num_waiting == 2)
        refused = HTTPResponse(ask("203.0.113.9, 198.51.100.7"))
        refused.begin()
        assert (refused.status, int(refused.headers["retry-after"])) == (429, 1)
        assert refused.headers["x-request-id"].startswith("req_")
        assert json.loads(refused.read())["error"]["code"] == "too_many_connections"
        assert listener.num_refused("forwarded_address_full") == 1
        # The proxy's connections and other clients' requests are not counted with them.
        assert [answer(ask(f"198.51.100.{number}"))[0] for number in range(8, 14)] == [200] * 6
        listener.call(listener.may_end.set)
        assert [answer(one)[0] for one in asking] == [200] * 2
        assert answer(ask("198.51.100.7"))[0] == 200
