"""A listener's connection, with timeouts against clients that hold it open without using it."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from loramux.admin.server.bounded_parser import MAX_HEAD_BYTES, BoundedParser
from loramux.admin.server.client_addresses import origin_of
from loramux.admin.server.connection_registry import ConnectionRegistry
from loramux.platform.requests.sse import WRITE_CHUNK

HEAD_TIMEOUT_S = 10.0
"""Maximum time, in seconds, from the opening of a connection to its first complete request head, or from the first byte
of a later request head to its last byte. uvicorn's keep-alive timeout limits the time between requests.
"""
READER_TIMEOUT_S = 60.0
"""Time within which a client must read MIN_READ_BYTES of a pending response, in seconds."""
MIN_READ_BYTES = 16 * 1024
MAX_BUFFERED_BYTES = 16 * 1024
"""Number of bytes in a connection's write buffer above which the app must wait before it writes more of a response. The
kernel buffers up to MAX_UNSENT_BYTES in addition.
"""
MAX_JOINED_BYTES = 64 * 1024
"""Largest part of a response that is copied to be sent together with the parts before it, in bytes."""
STALL_S = 1.0
"""A connection whose client has made no progress for this many seconds can be closed to make room for a new one."""

_BODY = (
    b'{"error":{"message":"this server has reached its limit of connections; try again",'
    b'"type":"server_error","param":null,"code":"too_many_connections"}}'
)
REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: " + str(len(_BODY)).encode() + b"\r\n\r\n" + _BODY
)
"""Response to a connection that exceeds a limit."""
_TOO_LONG = f"The request head exceeds {MAX_HEAD_BYTES} bytes.".encode()
LONG_HEAD_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n"
    b"content-length: " + str(len(_TOO_LONG)).encode() + b"\r\n\r\n" + _TOO_LONG
)


class JoinedWrites(asyncio.Transport):
    """Writes to a connection. After `hold`, what is written waits for `flush`, and then takes one system call."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._held: list[bytes] | None = None

    def hold(self) -> None:
        self._held = []

    def flush(self) -> None:
        if self._held is not None:
            data, self._held = b"".join(self._held), None
            # uvloop logs an error for each write, even of nothing, after the client has left.
            if data and not self._transport.is_closing():
                self._transport.write(data)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if len(data) > MAX_JOINED_BYTES:
            self.flush()
        if self._held is None:
            self._transport.write(data)
        else:
            self._held.append(bytes(data))

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self.flush()
        self._transport.close()


class BoundedConnection(H11Protocol):
    """A uvicorn connection that its listener's ConnectionRegistry can refuse or close.

    The connection waits for its client while a request head is incomplete, a body is arriving or a response is not
    being read. `since_s` is the time of the client's last progress.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = self._parser = BoundedParser()
        assert isinstance(server_state, ConnectionRegistry)
        self._asked: ASGIApp = self.app
        self.app = self._call_app
        self._book = server_state
        self.origin: str | None = None
        """The address or network under which the client's connections are counted. None for a trusted proxy."""
        self.since_s = self.loop.time()
        self._num_unread_bytes = 0
        self._has_unread_answer = False
        self._answer: JoinedWrites | None = None
        """What writes the current response."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(MAX_BUFFERED_BYTES)
        peer = self.client[0] if self.client is not None else ""
        self.origin = None if self._book.proxies.trusts(peer) else origin_of(peer)
        if not self._book.admit(self, self.loop.time()):
            transport.write(REFUSAL)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._book.leave(self)
        super().connection_lost(exc)
        # uvicorn leaves the timer running if the client has reset the connection.
        self._unset_keepalive_if_required()
        # `_call_app` refers to this object. Without the cycle, its memory is freed at once, not by a garbage collection
        # that all connections wait for.
        self.app = self._asked

    def data_received(self, data: bytes) -> None:
        begins_head = self._waits_for_request
        super().data_received(data)
        # The first byte of a request head and bytes of a body are progress, but other bytes of a head are not.
        if begins_head or not self.is_idle:
            self.since_s = self.loop.time()

    def _should_upgrade(self) -> bool:
        """No protocol is offered. uvicorn would advise the operator to install a library for each request that asks."""
        return False

    def send_400_response(self, msg: str) -> None:
        if self._parser.is_head_too_long:
            self.transport.write(LONG_HEAD_REFUSAL)
            self.transport.close()
        else:
            super().send_400_response(msg)

    def on_response_complete(self) -> None:
        if self._answer is not None:
            self._answer.flush()
        self.since_s = self.loop.time()
        if self.flow.write_paused:
            # Do not start the next pipelined request until the client has read this response. A client that does not
            # read then causes no further work.
            self._has_unread_answer = True
        else:
            super().on_response_complete()

    def pause_writing(self) -> None:
        self.since_s = self.loop.time()
        self._num_unread_bytes = 0
        super().pause_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._has_unread_answer:
            self._has_unread_answer = False
            super().on_response_complete()

    async def _call_app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app, but write the chunks of a streamed response directly, which is faster than through h11.

        h11 still reads requests and writes the head and the end of each response. Its state does not depend on the
        chunks in between. The head waits for the first part of the body until the end of the event loop's turn, so that
        most responses are sent, and received, at once.
        """
        cycle = self.cycle
        is_chunked = False
        cycle.transport = answer = self._answer = JoinedWrites(self.transport)

        async def write_chunk(body: bytes) -> None:
            if not is_chunked:
                await send({"type": "http.response.body", "body": body, "more_body": True})
                answer.flush()
                return
            if self.flow.write_paused and not cycle.disconnected:
                await self.flow.drain()
            # An empty chunk would end the response.
            if body and not cycle.disconnected:
                answer.write(b"%x\r\n%b\r\n" % (len(body), body))
                answer.flush()

        async def send_bounded(message: Message) -> None:
            nonlocal is_chunked
            if message["type"] == "http.response.start":
                is_chunked = _is_chunked(scope, message)
                answer.hold()
                self.loop.call_soon(answer.flush)
            elif message["type"] == "http.response.body" and message.get("more_body"):
                await write_chunk(message.get("body", b""))
                return
            await send(message)

        scope[WRITE_CHUNK] = write_chunk
        try:
            await self._asked(scope, receive, send_bounded)
        finally:
            # The function refers to the scope. Without the cycle, the request's memory is freed at once.
            del scope[WRITE_CHUNK]

    @property
    def is_idle(self) -> bool:
        """True if no request is in progress."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _waits_for_request(self) -> bool:
        """True if no byte has arrived since the last response. uvicorn then runs its keep-alive timer."""
        return self.timeout_keep_alive_task is not None

    def shed_rank(self, now_s: float) -> int | None:
        """Rank for closing connections to make room, lowest first. None if this connection must stay open."""
        is_stalled = now_s - self.since_s >= STALL_S
        if self.is_idle:
            # The first request on a new connection may still be arriving.
            return (0 if self.cycle is None else 1) if is_stalled else 3
        wants_body = self.cycle.more_body and not self.cycle.response_started and not self.flow.read_paused
        return 2 if is_stalled and (wants_body or self.flow.write_paused) else None

    def overdue(self, now_s: float) -> str | None:
        """Close the connection if its client is too slow, and return the reason."""
        num_bytes = self.transport.get_write_buffer_size()
        if num_bytes and (self.flow.write_paused or self.transport.is_closing()):
            self._num_unread_bytes = max(self._num_unread_bytes, num_bytes)
            if self._num_unread_bytes - num_bytes >= MIN_READ_BYTES:
                self._num_unread_bytes, self.since_s = num_bytes, now_s
            elif now_s - self.since_s > READER_TIMEOUT_S:
                self.transport.abort()
                return "slow_reader"
        elif (
            self.is_idle
            and not self._waits_for_request
            and now_s - self.since_s > HEAD_TIMEOUT_S
            and not self.transport.is_closing()
        ):
            # Closes the connection, as after a keep-alive timeout.
            self.timeout_keep_alive_handler()
            return "no_request"
        return None


def _is_chunked(scope: Scope, start: Message) -> bool:
    """Return whether h11 sends the response's body in chunks."""
    if scope["http_version"] != "1.1" or scope["method"] == "HEAD" or start["status"] in (204, 304):
        return False
    return all(name.lower() not in (b"content-length", b"transfer-encoding") for name, _ in start["headers"])
