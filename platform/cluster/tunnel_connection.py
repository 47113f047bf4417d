"""One gateway's connection to a replica's engine, through calls of the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import uuid

from loramux.engine.protocol.messages import Add
from loramux.platform.cluster.replica_calls import ReplicaCalls
from loramux.platform.cluster.tunnel import TunnelTransport
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.engine_link.engine_session import NoteEnd
from loramux.platform.replicas.framed_connection import FramedConnection


class TunnelConnection(FramedConnection):
    """A FramedConnection whose bytes travel in one stream from the replica and in single calls to it.

    The calls are made one after the other, so that bytes arrive in order. While a call is on its way, further messages
    gather for the next call.
    """

    def __init__(self, calls: ReplicaCalls, replica_id: str, note_end: NoteEnd) -> None:
        super().__init__(note_end)
        self._cluster = calls
        self._replica_id = replica_id
        self._session_id = uuid.uuid4().hex
        self._tunnel = TunnelTransport(self._link)
        self._receiver = asyncio.create_task(self._receive_all(), name="tunnel-receiver")
        self._sender = asyncio.create_task(self._send_all(), name="tunnel-sender")

    @staticmethod
    async def open(calls: ReplicaCalls, replica_id: str, note_end: NoteEnd, timeout_s: float) -> TunnelConnection:
        """Connect to the replica. Raises EngineUnavailable."""
        connection = TunnelConnection(calls, replica_id, note_end)
        try:
            async with asyncio.timeout(timeout_s):
                await connection.announced()
        except BaseException as error:
            connection.close(frozenset())
            if isinstance(error, TimeoutError):
                raise EngineUnavailable("the replica does not answer") from None
            raise
        return connection

    def close(self, running: frozenset[str]) -> list[Add]:
        ended = super().close(running)
        self._receiver.cancel()
        self._sender.cancel()
        return ended

    async def _receive_all(self) -> None:
        try:
            async with contextlib.aclosing(self._cluster.session(self._replica_id, self._session_id)) as received:
                async for data in received:
                    self._tunnel.receive(data)
        except Exception as error:
            self._tunnel.lose(error)
        finally:
            self._tunnel.lose()
            self._sender.cancel()

    async def _send_all(self) -> None:
        offset = 0
        try:
            while data := await self._tunnel.take():
                await self._cluster.send(self._replica_id, self._session_id, offset, data)
                offset += len(data)
        except Exception as error:
            self._tunnel.lose(error)
        finally:
            self._receiver.cancel()
