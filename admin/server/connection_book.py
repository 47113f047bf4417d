"""The connections of one listener: how many there are, whose they are, and which of them end for others' sake."""

from __future__ import annotations

from asyncio import Transport
from collections import OrderedDict
from itertools import islice
from operator import itemgetter
from typing import Protocol

from uvicorn.server import ServerState

from loramux.admin.server.client_addresses import TrustedProxies
from loramux.admin.server.connection_limits import ConnectionLimits
from loramux.platform.telemetry.metrics import GatewayMetrics

MAX_LOOKED_AT = 256
"""Connections that a search for one to shed looks at: a flood must not make each newcomer cost a look at all."""
MAX_COMPARED = 16
"""Candidates that a search compares before it sheds the best of them."""


class Connection(Protocol):
    """What the book asks of a connection: `BoundedConnection`."""

    since_s: float
    """When its client last did what the connection waits for."""

    @property
    def origin(self) -> str | None:
        """What its client is counted by; None for a trusted proxy."""

    @property
    def transport(self) -> Transport: ...

    def overdue(self, now_s: float) -> str | None:
        """End the connection if its client has kept it waiting for too long, and say which way."""

    def shed_rank(self, now_s: float) -> int | None:
        """How soon the connection ends when another needs its place, 0 first; None: never."""


class ConnectionBook(ServerState):
    """Says whether a new connection may stay.

    Where there is no room for it, connections that wait for their clients are shed: those of the address with most of
    them first, idle ones before those with a request under way, and then the oldest. Connections whose client waits for
    us are never shed.
    """

    def __init__(
        self,
        limits: ConnectionLimits | None = None,
        proxies: TrustedProxies | None = None,
        metrics: GatewayMetrics | None = None,
        listener: str = "openai",
    ) -> None:
        super().__init__()
        self.limits = limits or ConnectionLimits()
        self.proxies = proxies or TrustedProxies()
        self._listener = listener
        self._refusals = (metrics or GatewayMetrics()).note_listener(listener, lambda: len(self.connections))
        # In the order in which searches look at them.
        self._members: OrderedDict[Connection, None] = OrderedDict()
        # The same by origin, but for trusted proxies.
        self._members_of: dict[str, OrderedDict[Connection, None]] = {}

    def admit(self, connection: Connection, now_s: float) -> bool:
        """Count the connection, or refuse it."""
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
        """The connection is closed or about to be; it may be told more than once."""
        if connection not in self._members:
            return
        del self._members[connection]
        origin = connection.origin
        if origin is not None:
            del self._members_of[origin][connection]
            if not self._members_of[origin]:
                del self._members_of[origin]

    def sweep(self, now_s: float) -> None:
        """End the connections whose clients have kept us waiting for too long. To be called every second."""
        for connection in list(self._members):
            reason = connection.overdue(now_s)
            if reason is not None:
                self.note(reason)

    def note(self, reason: str) -> None:
        """Count a connection or request that was refused or ended."""
        self._refusals.labels(self._listener, reason).inc()

    def _num_of(self, origin: str | None) -> int:
        return 0 if origin is None else len(self._members_of.get(origin, ()))

    def _shed(self, members: OrderedDict[Connection, None], now_s: float) -> bool:
        """End the connection that can best be spared, of those that the search looks at; whether there was one."""
        waiting = []
        for connection in list(islice(members, MAX_LOOKED_AT)):
            # The next search looks at others.
            members.move_to_end(connection)
            rank = connection.shed_rank(now_s)
            if rank is not None:
                # A proxy's idle connections are a pool that it uses again: they go last.
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
