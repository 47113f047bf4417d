"""The sessions of gateways with the engine of a replica."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import zmq.asyncio

from loramux.engine.protocol.messages import ToEngine
from loramux.platform.cluster.tunnel import TunnelTransport
from loramux.platform.replicas.peer_relay import PeerRelay, RelayedEngine

END_WAIT_S = 5.0
"""How long the end of a session waits until the relay has ended, in seconds."""


class SessionRefused(Exception):
    """The call does not belong to an open session. The message says why."""


class GatewaySessions:
    """Relays gateways to `engine`, which treats each of them as one more gateway on its machine. `context` has the
    sockets.

    A session of a gateway that has died ends after some seconds, because its link has become silent.
    """

    def __init__(self, engine: RelayedEngine, context: zmq.asyncio.Context) -> None:
        self._engine = engine
        self._zmq = context
        self._sessions: dict[str, _Session] = {}

    async def run(self, session_id: str) -> AsyncGenerator[bytes, None]:
        """Open a session, and yield the bytes for the gateway. Raises SessionRefused if the session is open already."""
        if session_id in self._sessions:
            raise SessionRefused("the session is open already")
        relay = PeerRelay(self._zmq, self._engine, accepts=ToEngine)
        session = self._sessions[session_id] = _Session(TunnelTransport(relay.link))
        running = asyncio.create_task(relay.run())
        try:
            while data := await session.tunnel.take():
                yield data
        finally:
            del self._sessions[session_id]
            session.tunnel.lose()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_WAIT_S):
                    await running

    def receive(self, session_id: str, offset: int, data: bytes) -> None:
        """Receive bytes of a gateway, before which it has sent `offset` bytes. Bytes that have arrived are skipped.

        Raises SessionRefused if there is no such session, or if bytes are missing, which also ends the session.
        """
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionRefused("there is no such session")
        if offset > session.num_received:
            session.tunnel.lose()
            raise SessionRefused("bytes are missing")
        new = data[session.num_received - offset :]
        session.num_received += len(new)
        if new:
            session.tunnel.receive(new)


class _Session:
    def __init__(self, tunnel: TunnelTransport) -> None:
        self.tunnel = tunnel
        self.num_received = 0
