"""One gateway's connection to one engine process on this machine, over its Unix socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from loramux.engine.protocol.messages import PROTOCOL, Add, Credit
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.engine_link.engine_session import INITIAL_CREDIT, EngineSession, NoteEnd

READY_TIMEOUT_S = 30.0

log = structlog.get_logger()


class EngineConnection(EngineSession):
    """A ZeroMQ DEALER socket connected to an engine. `open` returns once the engine has announced itself."""

    def __init__(
        self, socket: zmq.asyncio.Socket, context: zmq.asyncio.Context, monitor: zmq.asyncio.Socket, note_end: NoteEnd
    ) -> None:
        super().__init__(note_end)
        self._socket = socket
        # The synchronous API of the same socket.
        self._plain_socket: Any = zmq.Socket.shadow(socket.underlying)
        self._context = context
        self._monitor = monitor
        self._reader = asyncio.create_task(self._read(), name="engine-reader")

    @staticmethod
    async def open(path: Path, note_end: NoteEnd, timeout_s: float = READY_TIMEOUT_S) -> EngineConnection:
        """Connect to the engine that listens at `path`.

        Raises EngineUnavailable if the engine does not answer or runs a different version of loramux.
        """
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(f"ipc://{path}")
        connection = EngineConnection(socket, context, monitor, note_end)
        connection._send(Credit(count=INITIAL_CREDIT))
        try:
            async with asyncio.timeout(timeout_s):
                await _first_of(connection._ready, connection._reader)
            if not connection._ready.done() or connection.info.protocol != PROTOCOL:
                raise EngineUnavailable("the engine runs a different version of loramux")
        except BaseException as error:
            connection.close(frozenset())
            if isinstance(error, TimeoutError):
                raise EngineUnavailable("the engine does not answer") from None
            raise
        return connection

    async def wait_lost(self) -> None:
        closed = asyncio.ensure_future(recv_monitor_message(self._monitor))
        try:
            await _first_of(closed, self._reader)
        finally:
            closed.cancel()

    def close(self, running: frozenset[str]) -> list[Add]:
        self._reader.cancel()
        self._take_what_arrived()
        ended = self._end_all(running)
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
        self._context.term()
        return ended

    def _send_bytes(self, data: bytes) -> None:
        # Without a high-water mark, a send never waits. The future from zmq.asyncio is therefore already done.
        self._socket.send(data)

    async def _read(self) -> None:
        """Dispatch messages until one cannot be decoded."""
        while True:
            data: bytes | None = await self._socket.recv()
            num_read = 0
            while data is not None:
                try:
                    message = self._decoder.decode(data)
                except msgspec.MsgspecError as error:
                    log.error("the engine sent an unreadable message", reason=str(error))
                    return
                self._dispatch(message)
                num_read += 1
                data = self._received_now() if num_read < INITIAL_CREDIT else None
            # Let readers of the streams run before more messages are handled, however fast messages arrive.
            await asyncio.sleep(0)

    def _take_what_arrived(self) -> None:
        """Handle messages that have already arrived, so that their tokens are billed and finished sequences do not
        fail.
        """
        while (data := self._received_now()) is not None:
            try:
                self._dispatch(self._decoder.decode(data))
            except msgspec.MsgspecError:
                return

    def _received_now(self) -> bytes | None:
        """Return a message that has already arrived, or None. This is ten times as fast as the asyncio `recv`."""
        try:
            data: bytes = self._plain_socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        return data


async def _first_of(*futures: asyncio.Future[Any]) -> None:
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
