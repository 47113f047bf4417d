from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPResponse
from typing import Any, TypeVar

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from loramux.admin.server.client_addresses import TrustedProxies
from loramux.admin.server.connection_limits import KEEP_ALIVE_S, ConnectionLimits
from loramux.admin.server.connection_registry import ConnectionRegistry
from loramux.admin.server.http_servers import HttpServer
from loramux.admin.server.listeners import bind
from loramux.platform.telemetry.metrics import GatewayMetrics
from tests.adversary.socket_flood import request

T = TypeVar("T")
WAIT_S = 30.0
"""Longest wait for a condition, in seconds."""
HELLO = request("GET", "/", {})
PARTS = (b"data: 1\n\n", b"", b"x" * 300, b"0\r\n\r\n")
"""An empty part, and one that looks like the end of a chunked response."""


@dataclass
class Listener:
    port: int
    book: ConnectionRegistry
    metrics: GatewayMetrics
    loop: Any = None
    num_asked: int = 0
    num_waiting: int = 0
    num_left: int = 0
    num_endless_bytes: int = 0
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """`/` returns the client's address, `/wait` blocks until a test allows the response, and `/endless` never ends.
        `/parts` sends PARTS as a stream, and `/late` a stream whose only part a test allows.

        Request bodies are always read to the end.
        """
        try:
            self.num_asked += 1
            self.num_waiting += 1
            message: Any = {"more_body": True}
            while message.get("more_body"):
                message = await receive()
            if scope["path"] == "/wait":
                await self.may_end.wait()
            said = json.dumps([scope["client"][0], scope["scheme"]]).encode()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for part in PARTS if scope["path"] == "/parts" else ():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            if scope["path"] == "/late":
                await self.may_end.wait()
                await send({"type": "http.response.body", "body": b"late", "more_body": True})
            while scope["path"] == "/endless" and not (message := await self._left(receive)):
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
                self.num_endless_bytes += 65536
            body = {"/large": b"x" * 8_000_000, "/parts": b""}.get(scope["path"], said)
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

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the server's event loop."""
        found: Future[T] = Future()

        def run() -> None:
            try:
                found.set_result(function())
            except BaseException as error:
                found.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return found.result(WAIT_S)

    def sweep_later(self, seconds: float) -> None:
        """Run the sweep as if `seconds` had passed."""
        self.call(lambda: self.book.sweep(self.loop.time() + seconds))

    def make_older(self, seconds: float) -> None:
        """Make every client look idle for `seconds` longer."""

        def move() -> None:
            for one in self.book._members:
                one.since_s -= seconds

        self.call(move)

    def open(self, sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.bind((source, 0))
        connection.settimeout(WAIT_S)
        connection.connect(("127.0.0.1", self.port))
        connection.sendall(sent)
        return connection

    def num_refused(self, reason: str) -> float:
        families = text_string_to_metric_families(self.metrics.render().decode())
        (family,) = (one for one in families if one.name == "loramux_network_refusals")
        (value,) = (one.value for one in family.samples if one.labels.get("reason") == reason and "total" in one.name)
        return value

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until a condition holds. It is evaluated on the server's event loop, because only that loop changes the
        server's state.
        """
        deadline = time.monotonic() + WAIT_S
        while not self.call(is_so):
            assert time.monotonic() < deadline, "the condition was not met in time"
            time.sleep(0.005)


@contextmanager
def listening(
    limits: ConnectionLimits | None = None,
    proxies: tuple[str, ...] = (),
    keep_alive_s: int = KEEP_ALIVE_S,
    root_path: str = "",
) -> Iterator[Listener]:
    metrics = GatewayMetrics()
    bound = bind("127.0.0.1", 0, "port")
    registry = ConnectionRegistry(limits, TrustedProxies(proxies), metrics.listeners, "openai")
    listener = Listener(bound.getsockname()[1], registry, metrics)
    server = HttpServer(listener, bound, listener.book, keep_alive_s, root_path)
    has_loop = threading.Event()

    async def serve() -> None:
        listener.loop = asyncio.get_running_loop()
        has_loop.set()
        await server.run_until_stopped()

    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    assert has_loop.wait(WAIT_S)
    listener.wait_until(server.is_listening.is_set)
    try:
        yield listener
    finally:
        listener.call(listener.may_end.set)
        server.force_exit = True
        server.stop()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def answer(connection: socket.socket) -> tuple[int, bytes]:
    response = HTTPResponse(connection)
    response.begin()
    return response.status, response.read()


def is_open(connection: socket.socket, wait_s: float = 0.1) -> bool:
    """Discard all data received from the server, and return whether the connection is still open after `wait_s`
    seconds without data.
    """
    connection.settimeout(wait_s)
    try:
        while connection.recv(65536):
            pass
    except TimeoutError:
        return True
    except OSError:
        return False
    return False


def is_closed(connection: socket.socket) -> bool:
    """Discard all data received from the server, and return whether it closes the connection. It may be slow."""
    return not is_open(connection, wait_s=WAIT_S)
