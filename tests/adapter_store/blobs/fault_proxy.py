from __future__ import annotations

import http.client
import random
import socket
import socketserver
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import urlsplit


class Fault(Enum):
    """A fault injected into one request. A `LOST` request reaches the store, but the store's answer is dropped."""

    SLOW_DOWN = "503 SlowDown"
    EXPIRED = "403 ExpiredToken"
    NOT_IMPLEMENTED = "501 NotImplemented"
    RESET = "connection reset"
    LOST_RESET = "connection reset after the store has done it"
    HANG = "no answer"
    LOST_HANG = "no answer after the store has done it"
    TRUNCATE = "answer cut short"
    FLIP = "one bit of a body flipped"
    FLIP_HEAD = "one bit of the answer's head flipped"
    STALE = "another object's answer, or none such"
    DRIP = "answer a byte at a time"


Plan = Callable[[str, str], Fault | None]
"""Maps a request's method and path to the fault to inject, or to None."""


def no_faults(method: str, path: str) -> Fault | None:
    return None


class SeededPlan:
    """Injects one of `faults`, drawn at random, into a fraction `rate` of the requests."""

    def __init__(self, seed: int, rate: float, faults: Sequence[Fault] = tuple(Fault)) -> None:
        self._random = random.Random(seed)
        self._rate = rate
        self._faults = faults
        self._lock = threading.Lock()

    def __call__(self, method: str, path: str) -> Fault | None:
        with self._lock:
            return self._random.choice(self._faults) if self._random.random() < self._rate else None


class ListedPlan:
    """Injects the listed faults, in order, into requests with `method`. None means no fault."""

    def __init__(self, method: str, *faults: Fault | None, part_of_path: str = "") -> None:
        self._method = method
        self._part_of_path = part_of_path
        self._faults = list(faults)
        self._lock = threading.Lock()

    def __call__(self, method: str, path: str) -> Fault | None:
        with self._lock:
            if method != self._method or self._part_of_path not in path or not self._faults:
                return None
            return self._faults.pop(0)


@dataclass(frozen=True, slots=True)
class _Answer:
    head: bytes
    body: bytes


class FaultProxy:
    """Listens on loopback until `stop` is called. `plan` can be changed at any time.

    Request headers named in `dropped` (lower case) are not forwarded. POSTs are forwarded one at a time, because moto
    checks that a key is free and assembles a multipart blob in two separate steps.
    """

    def __init__(
        self,
        upstream: str,
        plan: Plan = no_faults,
        hang_s: float = 10.0,
        drip_s: float = 0.05,
        dropped: Collection[str] = (),
    ) -> None:
        address = urlsplit(upstream)
        assert address.hostname is not None
        assert address.port is not None
        self.upstream = (address.hostname, address.port)
        self.plan = plan
        self.hang_s = hang_s
        self.drip_s = drip_s
        self.dropped = {"connection", "expect", *dropped}
        self.num_injected: Counter[Fault] = Counter()
        self.num_requests: Counter[str] = Counter()
        self.is_stopped = threading.Event()
        self.post_lock = threading.Lock()
        self._random = random.Random(0)
        self._lock = threading.Lock()
        self._seen: dict[str, _Answer] = {}
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.proxy = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def stop(self) -> None:
        self.is_stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def reseed(self, seed: int) -> None:
        self._random.seed(seed)

    def choose(self, method: str, path: str) -> Fault | None:
        fault = self.plan(method, path)
        with self._lock:
            self.num_requests[method] += 1
            if fault is not None:
                self.num_injected[fault] += 1
        return fault

    def flipped(self, data: bytes) -> bytes:
        if not data:
            return data
        with self._lock:
            bit = self._random.randrange(8 * len(data))
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    def remember(self, path: str, answer: _Answer) -> None:
        with self._lock:
            self._seen[path] = answer

    def stale(self, path: str) -> _Answer:
        """Return a stale answer: a 404, or another key's object as if it had once been stored under this key."""
        with self._lock:
            others = [answer for seen, answer in self._seen.items() if seen != path]
            if others and self._random.random() < 0.7:
                return self._random.choice(others)
        return _error(404, "Not Found", "NoSuchKey")


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128
    proxy: FaultProxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: injected faults make clients disconnect during requests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        self._relay()

    def do_HEAD(self) -> None:
        self._relay()

    def do_PUT(self) -> None:
        self._relay()

    def do_POST(self) -> None:
        self._relay()

    def do_DELETE(self) -> None:
        self._relay()

    def log_message(self, *arguments: Any) -> None:
        """Write no access log."""

    def _relay(self) -> None:
        proxy = self.server.proxy
        fault = proxy.choose(self.command, self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if fault is Fault.SLOW_DOWN:
            self._send(_error(503, "Slow Down", "SlowDown"))
        elif fault is Fault.EXPIRED:
            self._send(_error(403, "Forbidden", "ExpiredToken"))
        elif fault is Fault.NOT_IMPLEMENTED:
            self._send(_error(501, "Not Implemented", "NotImplemented"))
        elif fault is Fault.RESET:
            self._reset()
        elif fault is Fault.HANG:
            self._hang()
        elif fault is Fault.STALE and self.command == "GET":
            self._send(proxy.stale(self.path))
        else:
            is_flipped_up = fault is Fault.FLIP and self.command in ("PUT", "POST")
            with proxy.post_lock if self.command == "POST" else nullcontext():
                answer = self._ask_store(proxy.flipped(body) if is_flipped_up else body)
            if self.command == "GET" and fault is None:
                proxy.remember(self.path, answer)
            self._answer(answer, fault)

    def _answer(self, answer: _Answer, fault: Fault | None) -> None:
        proxy = self.server.proxy
        if fault is Fault.LOST_RESET:
            self._reset()
        elif fault is Fault.LOST_HANG:
            self._hang()
        elif fault is Fault.TRUNCATE:
            whole = answer.head + answer.body
            self.wfile.write(whole[: max(1, len(whole) - 1 - len(answer.body) // 2)])
            self.close_connection = True
        elif fault is Fault.FLIP:
            self._send(_Answer(answer.head, proxy.flipped(answer.body)))
        elif fault is Fault.FLIP_HEAD:
            self._send(_Answer(proxy.flipped(answer.head), answer.body))
            self.close_connection = True
        elif fault is Fault.DRIP:
            self._drip(answer.head + answer.body)
        else:
            self._send(answer)

    def _ask_store(self, body: bytes) -> _Answer:
        connection = http.client.HTTPConnection(*self.server.proxy.upstream, timeout=30)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in self.server.proxy.dropped:
                    connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            data = answer.read()
            lines = [f"HTTP/1.1 {answer.status} {answer.reason}"]
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "keep-alive"):
                    lines.append(f"{name}: {value}")
            if answer.getheader("Content-Length") is None:
                lines.append(f"Content-Length: {len(data)}")
            return _Answer("\r\n".join([*lines, "", ""]).encode("latin-1"), data)
        finally:
            connection.close()

    def _send(self, answer: _Answer) -> None:
        self.wfile.write(answer.head + (b"" if self.command == "HEAD" else answer.body))

    def _drip(self, data: bytes) -> None:
        until = time.monotonic() + self.server.proxy.hang_s
        for position in range(len(data)):
            if time.monotonic() > until or self.server.proxy.is_stopped.wait(self.server.proxy.drip_s):
                break
            self.wfile.write(data[position : position + 1])
        self.close_connection = True

    def _hang(self) -> None:
        """Stay silent until the client disconnects or `hang_s` has passed."""
        until = time.monotonic() + self.server.proxy.hang_s
        self.connection.settimeout(0.05)
        while time.monotonic() < until and not self.server.proxy.is_stopped.is_set():
            try:
                if not self.connection.recv(1):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        self.close_connection = True

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Closing the socket takes closing both the file and the connection.
        self.rfile.close()
        self.connection.close()
        self.close_connection = True


def _error(status: int, reason: str, code: str) -> _Answer:
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{code}</Code><Message></Message></Error>'.encode()
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return _Answer(head.encode(), body)
