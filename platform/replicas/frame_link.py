"""One TLS connection between two servers. It carries length-prefixed frames of bounded size.

Each side also sends an empty frame every second, so that both notice when the connection is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 16 << 20
"""Longest frame, in bytes. The longest message is an Add whose prompt fills a whole request body."""
MAX_UNSENT_BYTES = 64 << 20
"""Maximum number of unsent bytes. If there are more, the other server is not reading, so the connection is closed."""
PULSE_S = 1.0
"""Interval between empty frames, in seconds. They let each side notice that the other side is unreachable."""
MAX_SILENT_PULSES = 10
"""A connection counts as lost after this many pulses without a frame from the other server."""


class FrameRefused(Exception):
    """A received frame cannot be used. The message says why."""


class FrameLink(asyncio.Protocol):
    """Passes each received frame to `on_frame`. If `on_frame` raises FrameRefused, the connection ends.

    The future `lost` is done once the connection has ended, and its result says why. `ended` also waits until the
    socket is closed.
    """

    def __init__(self, on_frame: Callable[[bytes], None]) -> None:
        loop = asyncio.get_running_loop()
        self._on_frame = on_frame
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._num_silent = 0
        self._pulse: asyncio.TimerHandle | None = None
        self._is_writable = asyncio.Event()
        self._is_writable.set()
        self._is_closed = asyncio.Event()
        self.lost: asyncio.Future[str] = loop.create_future()

    def certificate(self) -> bytes | None:
        """Return the other server's certificate (DER), or None before the handshake is done."""
        transport = self._transport
        found = None if transport is None else transport.get_extra_info("ssl_object")
        return None if found is None else found.getpeercert(binary_form=True)

    def send(self, frame: bytes) -> None:
        """Send a frame without waiting. Does nothing once the connection has ended."""
        transport = self._transport
        if transport is None or self.lost.done():
            return
        transport.write(len(frame).to_bytes(LENGTH_BYTES) + frame)
        if transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.abort("the other server is not reading")

    @property
    def num_unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    async def writable(self) -> None:
        """Wait until the send buffer has room, or the connection has ended."""
        await self._is_writable.wait()

    def close(self, reason: str) -> None:
        """End the connection once all frames passed to `send` have been transmitted."""
        self._end(reason)
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        self._end(reason)
        if self._transport is not None:
            self._transport.abort()

    async def ended(self, timeout_s: float) -> None:
        """Wait until all frames are transmitted and the socket is closed. After `timeout_s`, abort the connection and
        raise TimeoutError.
        """
        if self._transport is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_closed.wait()
        finally:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's TLS transports have the methods of `asyncio.Transport`, but are not subclasses of it.
        self._transport = cast(asyncio.Transport, transport)
        self._beat()

    def data_received(self, data: bytes) -> None:
        self._num_silent = 0
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= LENGTH_BYTES and not self.lost.done():
            begin = start + LENGTH_BYTES
            size = int.from_bytes(self._buffer[start:begin])
            if size > MAX_FRAME_BYTES:
                self.abort(f"a frame has more than {MAX_FRAME_BYTES} bytes")
                return
            if len(self._buffer) < begin + size:
                break
            start = begin + size
            if size:
                try:
                    self._on_frame(bytes(self._buffer[begin:start]))
                except FrameRefused as error:
                    self.abort(str(error))
                    return
        del self._buffer[:start]

    def eof_received(self) -> None:
        self._end("the other server closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("the connection broke" if exc is None else f"the connection broke: {exc}")
        self._is_closed.set()
        if self._pulse is not None:
            self._pulse.cancel()

    def pause_writing(self) -> None:
        self._is_writable.clear()

    def resume_writing(self) -> None:
        self._is_writable.set()

    def _beat(self) -> None:
        if self.lost.done():
            return
        # Count pulses instead of measuring time, so that suspending this process does not end the connection.
        if self._num_silent >= MAX_SILENT_PULSES:
            self.abort(f"the other server was silent for {MAX_SILENT_PULSES * PULSE_S:.0f} s")
            return
        self._num_silent += 1
        self.send(b"")
        self._pulse = asyncio.get_running_loop().call_later(PULSE_S, self._beat)

    def _end(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)
        self._is_writable.set()
