"""Counts the connections of one listener, in total and per address, and closes some when a limit is reached."""

from __future__ import annotations

from asyncio import Transport
from collections import OrderedDict
from itertools import islice
from operator import itemgetter
from typing import Protocol

from prometheus_client import CollectorRegistry
from uvicorn.server import ServerState

from loramux.admin.server.client_addresses import TrustedProxies
from loramux.admin.server.connection_limits import ConnectionLimits
from loramux.platform.telemetry.package_metrics import ListenerMetrics, NewMetrics

MAX_LOOKED_AT = 256
"""Maximum number of connections examined to find one to close, so that a flood does not cause full scans."""
MAX_COMPARED = 16


class Connection(Protocol):
    """The connection interface that the registry needs. `BoundedConnection` implements it."""

    since_s: float
    """Time of the client's last progress, on the event loop's clock."""

    @property
    def origin(self) -> str | None:
        """The address or network under which the client's connections are counted. None for a trusted proxy."""

    @property
    def transport(self) -> Transport: ...

    def overdue(self, now_s: float) -> str | None:
        """Close the connection if its client is too slow, and return the reason."""

    def shed_rank(self, now_s: float) -> int | None:
        """Rank for closing connections to make room, lowest first. None if this connection must stay open."""


class ConnectionRegistry(ServerState):
    """Admits or refuses new connections, counting them in total and per address.

    When a limit is reached, the registry sheds (closes) a connection that waits for its client. Among the connections
    that it examines, it prefers the address with the most connections, then the lowest `shed_rank`, then the longest
    wait. Connections whose clients are waiting for the server are never shed.
    """

    def __init__(
        self,
        limits: ConnectionLimits | None = None,
        proxies: TrustedProxies | None = None,
        metrics: ListenerMetrics | None = None,
        listener: str = "openai",
    ) -> None:
        super().__init__()
        self.limits = limits or ConnectionLimits()
        self.proxies = proxies or TrustedProxies()
        self._listener = listener
        metrics = metrics or ListenerMetrics(NewMetrics(CollectorRegistry()))
        self._refusals = metrics.note_listener(listener, lambda: len(self.connections))
        # Connections in the order in which searches examine them.
        self._members: OrderedDict[Connection, None] = OrderedDict()
        # The same connections, grouped by origin, without the connections of trusted proxies.
        self._members_of: dict[str, OrderedDict[Connection, None]] = {}

    def admit(self, connection: Connection, now_s: float) -> bool:
        origin = connection.origin
        if self._num_of(origin) >= self.limits.max_per_address:
            assert origin is not None
            if not self._shed(self._members_of[origin], now_s):
                self.note("address_full")
                return False
        elif len(self._members) >= self.limits.max_connections and not self._shed(self._members, now_s):
            self.note("listener_full")
            return False
        self._members[connection] = None
        if origin is not None:
            self._members_of.setdefault(origin, OrderedDict())[connection] = None
        return True

    def leave(self, connection: Connection) -> None:
        """Stop counting a connection that is closed or about to close. Can be called more than once."""
        if connection not in self._members:
            return
        del self._members[connection]
        origin = connection.origin
        if origin is not None:
            del self._members_of[origin][connection]
            if not self._members_of[origin]:
                del self._members_of[origin]

    def sweep(self, now_s: float) -> None:
        """Close the connections whose clients are too slow. Must be called every second."""
        for connection in list(self._members):
            reason = connection.overdue(now_s)
            if reason is not None:
                self.note(reason)

    def note(self, reason: str) -> None:
        """Count a refused or closed connection, or a refused request."""
        self._refusals.labels(self._listener, reason).inc()

    def _num_of(self, origin: str | None) -> int:
        return 0 if origin is None else len(self._members_of.get(origin, ()))

    def _shed(self, members: OrderedDict[Connection, None], now_s: float) -> bool:
        """Close the best candidate among the connections examined. Return False if there is none."""
        waiting = []
        for connection in list(islice(members, MAX_LOOKED_AT)):
            # Move examined connections to the end, so that the next search starts with different ones.
            members.move_to_end(connection)
            rank = connection.shed_rank(now_s)
            if rank is not None:
                # A proxy reuses its idle connections, so they are shed last.
                waiting.append((-self._num_of(connection.origin), rank, connection.since_s, connection))
                if len(waiting) == MAX_COMPARED:
                    break
        if not waiting:
            return False
        connection = min(waiting, key=itemgetter(0, 1, 2))[3]
        self.leave(connection)
        connection.transport.abort()
        self.note("shed")
        return True
