"""The connections of one listener: how many there are, whose they are, and which of them end for others' sake."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import TYPE_CHECKING

from uvicorn.server import ServerState

from loramux.admin.client_addresses import TrustedProxies
from loramux.admin.connection_limits import ConnectionLimits
from loramux.platform.metrics import GatewayMetrics

if TYPE_CHECKING:
    from loramux.admin.bounded_connection import BoundedConnection

SHED_SHARE = 64
"""One in so many connections ends when a new one finds no room: a search looks at all, so it makes room for several."""


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
        # A dictionary for its order, in which they came.
        self._members: dict[BoundedConnection, None] = {}
        # Of peers that are no trusted proxies.
        self._num_by_origin: Counter[str] = Counter()
        # Where the last search found nobody to shed; None: at all addresses together.
        self._searched_in_vain: set[str | None] = set()

    def admit(self, connection: BoundedConnection, now_s: float) -> bool:
        """Count the connection, or refuse it."""
        origin = connection.origin
        if origin is not None and self._num_by_origin[origin] >= self.limits.max_per_address:
            if not self._shed(origin, now_s):
                self.note("address_full")
                return False
        elif len(self._members) >= self.limits.max_connections and not self._shed(None, now_s):
            self.note("listener_full")
            return False
        self._members[connection] = None
        if origin is not None:
            self._num_by_origin[origin] += 1
        return True

    def leave(self, connection: BoundedConnection) -> None:
        """The connection is closed or about to be; it may be told more than once."""
        if connection not in self._members:
            return
        del self._members[connection]
        origin = connection.origin
        if origin is not None:
            self._num_by_origin[origin] -= 1
            if not self._num_by_origin[origin]:
                del self._num_by_origin[origin]

    def sweep(self, now_s: float) -> None:
        """End the connections whose clients have kept us waiting for too long. To be called every second."""
        self.search_again()
        for connection in list(self._members):
            reason = connection.overdue(now_s)
            if reason is not None:
                self.note(reason)

    def search_again(self) -> None:
        """There may be connections to shed where there were none."""
        self._searched_in_vain.clear()

    def note(self, reason: str) -> None:
        """Count a connection or request that was refused or ended."""
        self._refusals.labels(self._listener, reason).inc()

    def _shed(self, origin: str | None, now_s: float) -> bool:
        """End some connections that wait for their clients, of one origin or of any; whether there were any."""
        if origin in self._searched_in_vain:
            return False
        found = [one for one in self._members if origin is None or one.origin == origin]
        waiting = [(one, rank) for one in found if (rank := one.shed_rank(now_s)) is not None]
        # A proxy's idle connections are a pool that it uses again: they go last.
        num_waiting = Counter(one.origin for one, _ in waiting)
        del num_waiting[None]
        ranked = heapq.nsmallest(
            1 + len(found) // SHED_SHARE, waiting, key=lambda one: (-num_waiting[one[0].origin], one[1], one[0].since_s)
        )
        # No more requests end than have to.
        shed = [one for number, (one, _) in enumerate(ranked) if number == 0 or one.is_idle]
        for connection in shed:
            self.leave(connection)
            connection.transport.abort()
            self.note("shed")
        if not shed:
            self._searched_in_vain.add(origin)
        return bool(shed)
