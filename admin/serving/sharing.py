"""Assembles the components with which a server shares requests with other servers on its database."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from importlib.metadata import version

from loramux.admin.errors import StartRefused
from loramux.admin.server.listeners import bind
from loramux.admin.server.settings import Settings
from loramux.admin.serving.chosen_router import router_factory
from loramux.engine.protocol.messages import PROTOCOL, Stats, StatsRequest
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.platform.base_draw import BaseDraw
from loramux.platform.engine_link.crash_strikes import CrashStrikes
from loramux.platform.engine_link.engine_client import EngineClient
from loramux.platform.replicas.certificates import OwnCertificates
from loramux.platform.replicas.peer_listener import PeerListener
from loramux.platform.replicas.peer_relay import RelayedEngine
from loramux.platform.replicas.presence import Presence
from loramux.platform.replicas.records import ReplicaRow, base_fingerprint
from loramux.platform.replicas.replica_table import ReplicaTable
from loramux.platform.replicas.reports import ReplicaReport, UnknownReplica
from loramux.platform.replicas.routed_engine import RoutedEngine
from loramux.platform.telemetry.package_metrics import ReplicaMetrics
from loramux.platform.threads import call_on


class Sharing:
    """One server's connection to the other servers on its database.

    `local` runs sequences on this server, `relayed` is where other servers reach it, and `capacity` returns how many
    sequences it can run at once. If it has several engines, `engines` has them by name. `engine` takes the place of
    `local` in the gateway. `open_presence` needs a `local` that is ready. If the port of the setting `peer_address` is
    0, the listener's own port is published. `strikes` are those of this server's engines. Raises StartRefused if the
    router cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        local: EngineClient,
        relayed: RelayedEngine,
        capacity: Callable[[], int],
        engines: Mapping[str, EngineClient],
        strikes: CrashStrikes,
        database: Database,
        metrics: ReplicaMetrics,
        executor: Executor,
        draw: BaseDraw,
    ) -> None:
        assert settings.peer_address is not None
        self.address = f"{settings.peer_address.rpartition(':')[0]}:{listener.getsockname()[1]}"
        self._listener = listener
        self._local = local
        self._relayed = relayed
        self.capacity = capacity
        self.engines = self.measured = engines
        self._database = database
        self._metrics = metrics
        self._executor = executor
        self._id = new_id("rep")
        self._draw = draw
        self._strikes = strikes
        self._presence: Presence | None = None
        self.engine = RoutedEngine(
            local,
            self._id,
            router_factory(settings.router),
            metrics.count_forwarded,
            metrics.base_fallbacks.inc,
            base_id=draw.own,
            is_own_only=settings.routing == "off",
            drawn_bases=lambda: draw.bases,
        )

    def open_presence(self) -> Presence:
        """Listen for other servers. The caller runs and closes the Presence."""
        ready = self._local.info
        if ready is None:
            raise StartRefused("the engine stopped during startup")
        row = ReplicaRow(
            id=self._id,
            address=self.address,
            base=base_fingerprint(ready),
            base_id=ready.base_sha256,
            version=version("loramux"),
            protocol=PROTOCOL,
            state="serving",
            beat=0,
            num_running=0,
            num_waiting=0,
            capacity=self.capacity(),
            num_pages=ready.num_pages,
            num_free_pages=ready.num_pages,
            certificates="",
        )
        listener = PeerListener(self._listener, self._relayed, self._metrics.count_refusal)
        listener.start()
        self._presence = Presence(
            own=row,
            table=ReplicaTable(self._database),
            certificates=OwnCertificates(self._id),
            local=self._local,
            engine=self.engine,
            draw=self._draw,
            listener=listener,
            metrics=self._metrics,
            call=partial(call_on, self._executor),
            strikes=self._strikes,
        )
        return self._presence

    def reports(self) -> Sequence[ReplicaReport]:
        """Implements `Fleet.reports`. There are no reports before `open_presence`."""
        return () if self._presence is None else self._presence.reports()

    async def stats_of(self, replica_id: str, timeout_s: float, with_tiers: bool) -> Stats:
        """Implements `Fleet.stats_of`, also for the names of this server's engines."""
        if replica_id in self.engines:
            return await self.engines[replica_id].call(StatsRequest(with_tiers=with_tiers), timeout_s)
        if self._presence is None:
            raise UnknownReplica(replica_id)
        return await self._presence.stats_of(replica_id, timeout_s, with_tiers)


def bind_peers(settings: Settings, address: str) -> socket.socket:
    """Bind the peer listener. Raises StartRefused unless the database and the blob store can be shared."""
    if settings.is_database_embedded:
        raise StartRefused(
            "servers share requests through their database, but this server has its own: set --database-url, "
            "or remove peer_address"
        )
    if settings.blob_url is None:
        raise StartRefused(
            "servers that share requests need the same blob store, but this server has its own: set --blob-url, "
            "or remove peer_address"
        )
    host, _, port = address.rpartition(":")
    return bind(host.strip("[]"), int(port), "peer_address")
