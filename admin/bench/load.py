"""Sends a load to an OpenAI API over HTTP, and keeps what arrives with the time of each read.

Answers are parsed only after the load has ended, so that parsing delays no read.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvloop

from loramux.admin.bench.asks import PATHS, Ask
from loramux.admin.bench.http_reader import BrokenResponse, ResponseReader
from loramux.admin.client.openai_server import OpenAIServer

READ_BYTES = 1 << 16
STREAMED: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
"""Fields of a request whose answer is streamed, unless it sets others."""


@dataclass(slots=True)
class Received:
    """One request and its answer. Times are in seconds on `time.perf_counter`."""

    ask: Ask
    due_s: float
    """When the load should send the request."""
    sent_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0
    """The HTTP status, or 0 if none arrived."""
    data: list[bytes] = field(default_factory=list)
    """The body's bytes, one item per read."""
    times_s: list[float] = field(default_factory=list)
    """The time of each read."""
    error: str | None = None
    """Why the connection failed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All answers of a load in the order of the requests, and the seconds from its start to the last answer's end."""

    received: list[Received]
    seconds: float


class Connections:
    """Connections to one server. A connection carries one request at a time and is then used again."""

    def __init__(self, server: OpenAIServer, endpoint: str, timeout_s: float = 600.0) -> None:
        parts = urlsplit(server.url)
        is_tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if is_tls else 80)
        self._tls = ssl.create_default_context() if is_tls else None
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        headers = {
            "host": parts.netloc.rpartition("@")[2],
            "content-type": "application/json",
            "accept": "text/event-stream",
            "accept-encoding": "identity",
            "user-agent": "loramux-bench",
            **server.headers,
        }
        lines = [f"POST {parts.path}{PATHS[endpoint]} HTTP/1.1", *(f"{name}: {one}" for name, one in headers.items())]
        self._head = "\r\n".join(lines).encode()

    async def send(self, received: Received) -> None:
        """Send a request and receive its answer. A failure is kept in `received`."""
        body = msgspec.json.encode(STREAMED | received.ask.body(self._endpoint))
        request = self._head + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        received.sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                # A server can close an idle connection at any time, so one that fails without an answer is replaced.
                while self._idle and not received.status:
                    reader, writer = self._idle.pop()
                    # uvloop raises a RuntimeError for a write after the server has reset the connection.
                    if writer.is_closing():
                        continue
                    if await self._exchange(reader, writer, request, received, is_reused=True):
                        return
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=READ_BYTES)
                await self._exchange(reader, writer, request, received, is_reused=False)
        except TimeoutError:
            received.error = f"no complete answer within {self._timeout_s:g} s"
        except (OSError, BrokenResponse) as error:
            received.error = str(error) or type(error).__name__
        finally:
            received.ended_s = time.perf_counter()

    async def _exchange(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        request: bytes,
        received: Received,
        *,
        is_reused: bool,
    ) -> bool:
        """Return False if a reused connection turned out to be closed."""
        response = ResponseReader()
        is_kept = False
        try:
            writer.write(request)
            while not response.is_done:
                data = await reader.read(READ_BYTES)
                at_s = time.perf_counter()
                if not data:
                    if is_reused and not received.times_s:
                        return False
                    response.end()
                    break
                body = response.feed(data)
                received.status = response.status
                received.times_s.append(at_s)
                received.data.append(body)
            is_kept = response.is_reusable
        except ConnectionError:
            if is_reused and not received.times_s:
                return False
            raise
        finally:
            if is_kept:
                self._idle.append((reader, writer))
            else:
                writer.close()
        return True

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()
        self._idle.clear()


def run_load(
    server: OpenAIServer,
    endpoint: str,
    due: Iterable[tuple[float, Ask]],
    *,
    max_open: int | None = None,
    timeout_s: float = 600.0,
    advance: Callable[[int], None] = lambda _done: None,
) -> Outcome:
    """Send each request at its time in seconds from the start, and return all answers, not yet parsed.

    At most `max_open` requests are open at once; later ones wait. `advance` is called with the number of answers that
    have ended.
    """
    return uvloop.run(_run(Connections(server, endpoint, timeout_s), due, max_open, advance))


async def _run(
    connections: Connections,
    due: Iterable[tuple[float, Ask]],
    max_open: int | None,
    advance: Callable[[int], None],
) -> Outcome:
    places = asyncio.Semaphore(max_open) if max_open else None
    answers: list[Received] = []
    num_ended = 0

    async def one(received: Received) -> None:
        nonlocal num_ended
        try:
            await connections.send(received)
        finally:
            if places is not None:
                places.release()
        num_ended += 1
        advance(num_ended)

    started = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for at_s, ask in due:
                if (wait_s := started + at_s - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                if places is not None:
                    await places.acquire()
                answers.append(Received(ask, started + at_s))
                group.create_task(one(answers[-1]))
    finally:
        connections.close()
    return Outcome(answers, time.perf_counter() - started)
