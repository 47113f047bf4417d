"""A transport for FrameLink whose bytes travel in calls between two processes instead of in a socket."""

from __future__ import annotations

import asyncio
from typing import Any

MAX_CHUNK_BYTES = 1 << 20
"""Most bytes that one call carries."""
PAUSE_BYTES = 1 << 20
"""Number of unsent bytes above which the protocol is asked to pause."""


class TunnelTransport(asyncio.Transport):
    """Buffers what `protocol` writes, until `take` hands it over. `receive` passes bytes of the other side on.

    The caller that carries the bytes calls `lose` when it cannot carry more.
    """

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._protocol = protocol
        self._unsent = bytearray()
        self._is_closing = False
        self._is_paused = False
        self._is_lost = False
        self._has_news = asyncio.Event()
        protocol.connection_made(self)

    async def take(self) -> bytes:
        """Wait for bytes, and return at most MAX_CHUNK_BYTES. Return b"" once the transport is closed and empty."""
        while not self._unsent and not self._is_closing:
            self._has_news.clear()
            await self._has_news.wait()
        chunk = bytes(self._unsent[:MAX_CHUNK_BYTES])
        del self._unsent[: len(chunk)]
        if self._is_paused and len(self._unsent) <= PAUSE_BYTES:
            self._is_paused = False
            self._protocol.resume_writing()
        return chunk

    def receive(self, data: bytes) -> None:
        if not self._is_closing:
            self._protocol.data_received(data)

    def lose(self, error: Exception | None = None) -> None:
        """Note that nothing can be carried any more. Further calls do nothing."""
        self.abort()
        if not self._is_lost:
            self._is_lost = True
            self._protocol.connection_lost(error)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._is_closing:
            return
        self._unsent += data
        self._has_news.set()
        if not self._is_paused and len(self._unsent) > PAUSE_BYTES:
            self._is_paused = True
            self._protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True
        self._has_news.set()

    def abort(self) -> None:
        self._unsent.clear()
        self.close()
