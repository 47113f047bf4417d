"""The TLS listener through which other servers, identified by their certificates, use the local engine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable, Mapping

import structlog
import zmq.asyncio

from loramux.platform.replicas.certificates import OwnCertificate, PublishedCertificate, tls_context
from loramux.platform.replicas.peer_relay import PeerRelay, RelayedEngine

HANDSHAKE_TIMEOUT_S = 5.0
MAX_CONNECTIONS = 128
"""Maximum number of connections, including those in a handshake. Further connections wait in the kernel's backlog."""
MAX_CONNECTIONS_EACH = 2
"""Maximum number of connections from one server. The second replaces a connection that is about to be lost."""
CLOSE_WAIT_S = 1.0
"""Longest wait for the last frames to be transmitted when a connection is closed, in seconds."""
BACKLOG = 128
ACCEPT_PAUSE_S = 1.0
"""Pause, in seconds, after a failed `accept` call, which can mean that no file descriptor is free."""

log = structlog.get_logger()


class PeerListener:
    """Relays each connection to the local engine.

    `accept_from` replaces the accepted certificates. A new connection without an accepted certificate is refused during
    the handshake. `end_all_but` ends the connections of servers that are gone.
    """

    def __init__(self, listener: socket.socket, engine: RelayedEngine, count_refusal: Callable[[str], None]) -> None:
        self._listener = listener
        self._engine = engine
        self._count_refusal = count_refusal
        self._context: ssl.SSLContext | None = None
        self._replica_of: Mapping[bytes, str] = {}
        self._relays: dict[PeerRelay, str] = {}
        self._refuses_new = False
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._zmq = zmq.asyncio.Context()
        self._acceptor: asyncio.Task[None] | None = None

    @property
    def num_sequences(self) -> int:
        """Number of other servers' sequences that are running or waiting in the local engine."""
        return sum(relay.num_sequences for relay in self._relays)

    def start(self) -> None:
        # Accepted connections inherit the option, so the next run can bind the port while they linger.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.setblocking(False)
        self._listener.listen(BACKLOG)
        self._acceptor = asyncio.create_task(self._accept(), name="peer-acceptor")

    def accept_from(self, own: OwnCertificate, accepted: Mapping[str, tuple[PublishedCertificate, ...]]) -> None:
        """Accept exactly these certificates from now on. `accepted` maps replica identifiers to certificates."""
        every = [one for certificates in accepted.values() for one in certificates]
        self._replica_of = {one.der: name for name, certificates in accepted.items() for one in certificates}
        self._context = tls_context(ssl.PROTOCOL_TLS_SERVER, own, every) if every else None

    def refuse_new(self) -> None:
        """Refuse all further sequences. Sequences that have already arrived still run."""
        self._refuses_new = True
        for relay in self._relays:
            relay.refuse_new()

    def end_all_but(self, replicas: frozenset[str]) -> None:
        """End the connections of servers that are not in `replicas`, because their rows have been deleted."""
        for relay, name in self._relays.items():
            if name not in replicas:
                relay.end("its server is no longer a replica")

    async def close(self) -> None:
        """End every connection. The engine then ends their sequences."""
        tasks = [*self._tasks, *([] if self._acceptor is None else [self._acceptor])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._listener.close()
        self._zmq.destroy(linger=0)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                accepted, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                self._slots.release()
                log.warning("accepting a peer's connection failed", reason=str(error))
                await asyncio.sleep(ACCEPT_PAUSE_S)
                continue
            task = asyncio.create_task(self._serve(accepted), name="peer")
            self._tasks.add(task)
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a peer's connection failed", exc_info=error)

    async def _serve(self, accepted: socket.socket) -> None:
        context = self._context
        if context is None or not self._engine.is_ready:
            accepted.close()
            return
        relay = PeerRelay(self._zmq, self._engine)
        try:
            await self._relay(relay, accepted, context)
        finally:
            self._relays.pop(relay, None)
            relay.end("this server closed the connection")
            with contextlib.suppress(TimeoutError):
                await relay.link.ended(CLOSE_WAIT_S)

    async def _relay(self, relay: PeerRelay, accepted: socket.socket, context: ssl.SSLContext) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: relay.link, accepted, ssl=context, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
            )
        except OSError as error:
            # The other side is a port scanner, an attacker, or a server whose certificate has expired or is not known
            # yet.
            log.info("a connection was refused because its TLS handshake failed", reason=str(error))
            self._count_refusal("handshake")
            return
        name = self._replica_of.get(relay.link.certificate() or b"")
        if name is None or sum(other == name for other in self._relays.values()) >= MAX_CONNECTIONS_EACH:
            self._count_refusal("handshake" if name is None else "connections")
            return
        self._relays[relay] = name
        if self._refuses_new:
            relay.refuse_new()
        log.info("a replica connected", replica=name)
        reason = await relay.run()
        log.info("a replica disconnected", replica=name, reason=reason)
