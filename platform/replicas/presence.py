"""Publishes this server's row, reads the rows of other servers, and keeps connections to them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import structlog
from sqlalchemy.exc import SQLAlchemyError

from loramux.engine.protocol.messages import Stats, StatsRequest
from loramux.platform.base_draw import BaseDraw
from loramux.platform.engine_link.crash_strikes import CrashStrikes
from loramux.platform.engine_link.engine_client import EngineClient, EngineUnavailable
from loramux.platform.replicas.certificates import Now, OwnCertificates, utc_now
from loramux.platform.replicas.claim_checks import ClaimChecks
from loramux.platform.replicas.own_replica import OwnReplica, view_of
from loramux.platform.replicas.peer_engine import PeerEngine
from loramux.platform.replicas.peer_listener import PeerListener
from loramux.platform.replicas.records import ReplicaRow
from loramux.platform.replicas.replica_book import ReplicaBook
from loramux.platform.replicas.replica_table import ReplicaTable, Summary, TableReading
from loramux.platform.replicas.reports import ReplicaReport, ReplicaState, UnknownReplica, refused_reports, report_of
from loramux.platform.replicas.routed_engine import RoutedEngine
from loramux.platform.routing.views import ReplicaView
from loramux.platform.telemetry.package_metrics import ReplicaMetrics

BEAT_S = 1.0
"""Interval between beats, in seconds. Each beat publishes this server's row and reads the rows of other servers."""
STATS_WAIT_S = 1.0
DRAIN_POLL_S = 0.1
EXCHANGE_WAIT_S = 2.0
"""How long a beat waits for the database, in seconds."""

log = structlog.get_logger()


class Call(Protocol):
    """Runs a blocking function on a thread."""

    def __call__(self, function: Callable[..., Any], *args: Any) -> Awaitable[Any]: ...


class Presence:
    """Tells other servers about this server, and this server's router about the other servers.

    `start` starts the background tasks, and `close` ends them.
    The clients of the other servers' engines share `strikes` with those of this server.

    While the database is down, known peers are kept until their connections fail. Requests for a lost peer run on the
    remaining servers.
    """

    def __init__(
        self,
        *,
        own: ReplicaRow,
        table: ReplicaTable,
        certificates: OwnCertificates,
        local: EngineClient,
        engine: RoutedEngine,
        draw: BaseDraw,
        listener: PeerListener,
        metrics: ReplicaMetrics,
        call: Call,
        strikes: CrashStrikes,
        clock: Callable[[], float] = time.monotonic,
        now: Now = utc_now,
    ) -> None:
        self._own = OwnReplica(own, certificates)
        self._table = table
        self._certificates = certificates
        self._local = local
        self._engine = engine
        self._draw = draw
        self._listener = listener
        self._metrics = metrics
        self._call = call
        self._strikes = strikes
        self._clock = clock
        self._book = ReplicaBook(own, draw, metrics.count_refusal, clock, now)
        self._claims = ClaimChecks(metrics.count_refusal, clock)
        self._peers: dict[str, PeerEngine] = {}
        self._last_stats: Stats | None = None
        self._published_version = -1
        self._exchange: asyncio.Task[TableReading] | None = None
        self._is_database_lost = False
        self._accepted: object = None
        self._turns = itertools.count()
        self._drains_since_s: float | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_relayed(self) -> int:
        """Number of sequences that the local engine runs for other servers."""
        return self._listener.num_sequences

    def reports(self) -> list[ReplicaReport]:
        """Report on this server first, then on its peers, then on refused servers. Peers and refused servers are each
        sorted by identifier.
        """
        now_s = self._clock()
        found = [_report(self._own.row, self._own.view(now_s), self._own.row.state, now_s)]
        for name, peer in sorted(self._book.peers.items()):
            engine = self._peers.get(name)
            is_reachable = engine is not None and engine.is_ready
            state = peer.row.state if is_reachable else "unreachable"
            found.append(_report(peer.row, view_of(peer.row, peer.holds, peer.since_s), state, now_s))
        return found + refused_reports(self._book.refused)

    async def stats_of(self, replica_id: str, timeout_s: float, with_tiers: bool) -> Stats:
        """Return the statistics of a server's engine. Raises UnknownReplica, EngineUnavailable or TimeoutError."""
        engine = self._local if replica_id == self._own.row.id else self._peers.get(replica_id)
        if engine is None:
            raise UnknownReplica(replica_id)
        return await engine.call(StatsRequest(with_tiers=with_tiers), timeout_s)

    def drain(self) -> None:
        """Refuse further sequences from other servers, and announce this with the next beat.

        Accepted sequences still run.
        """
        self._drains_since_s = self._clock()
        self._own.drain()
        self._listener.refuse_new()

    def start(self, drain: asyncio.Event) -> None:
        """Publish a beat and check a peer's claims every second, until `close`. Once `drain` is set, refuse sequences
        from other servers.
        """
        self._tasks.append(asyncio.create_task(self._beat_forever(), name="presence"))
        self._tasks.append(asyncio.create_task(self._drain_after(drain), name="presence-drain"))
        self._tasks.append(asyncio.create_task(self._check_claims_forever(), name="claim-checks"))

    async def drained(self, hurry: asyncio.Event, drain_s: float) -> None:
        """Wait until no other server's sequence runs here, or `hurry` is set, or `drain` was called `drain_s` ago."""
        now_s = self._clock()
        passed_s = 0.0 if self._drains_since_s is None else now_s - self._drains_since_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, drain_s - passed_s)):
                while self.num_relayed and not hurry.is_set():  # noqa: ASYNC110  sequences end in the engine
                    await asyncio.sleep(DRAIN_POLL_S)

    async def beat(self) -> None:
        """Publish this server's row, read the other rows, and update the router."""
        self._certificates.renew_if_due()
        self._own.observe(await self._stats())
        reading = await self._exchanged()
        if reading is not None:
            self._book.note(reading)
            self._claims.forget_all_but(self._book.peers.keys())
            self._accept(frozenset(str(values["id"]) for values in reading.rows))
            await self._connect(frozenset(str(values["id"]) for values in reading.rows))
        self._route()

    async def check_claims(self) -> None:
        """Check the claims of one peer. Successive calls check the peers in turn."""
        ready = sorted(name for name, engine in self._peers.items() if engine.is_ready and name in self._book.peers)
        if not ready:
            return
        name = ready[next(self._turns) % len(ready)]
        try:
            stats = await self._peers[name].call(StatsRequest(), STATS_WAIT_S)
        except (EngineUnavailable, TimeoutError):
            return
        peer = self._book.peers.get(name)
        if peer is not None:
            self._claims.note(name, peer.holds, stats)

    async def close(self) -> None:
        """End the connections and delete this server's row. If that fails, other servers delete the row later."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await asyncio.gather(*(engine.close() for engine in self._peers.values()))
        await self._listener.close()
        try:
            async with asyncio.timeout(EXCHANGE_WAIT_S):
                if self._exchange is not None:
                    # A beat that is still being written would restore the row.
                    await asyncio.wait((self._exchange,))
                await self._call(self._table.remove, self._own.row.id)
        except (SQLAlchemyError, TimeoutError):
            log.info("the row in the table of replicas stays until other servers delete it")

    async def _drain_after(self, drain: asyncio.Event) -> None:
        await drain.wait()
        self.drain()

    async def _beat_forever(self) -> None:
        while True:
            try:
                await self.beat()
            except Exception:
                # Requests do not depend on this loop, so an error here must not end the server.
                log.exception("a beat failed")
            await asyncio.sleep(BEAT_S)

    async def _check_claims_forever(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                await self.check_claims()
            except Exception:
                log.exception("a check of a replica's claims failed")

    async def _stats(self) -> Stats | None:
        """Return the engine's last answer, or None if the engine does not run."""
        try:
            self._last_stats = await self._local.call(StatsRequest(), STATS_WAIT_S)
        except EngineUnavailable:
            self._last_stats = None
        except TimeoutError:
            # A busy engine that answers late must not look empty.
            pass
        return self._last_stats

    async def _exchanged(self) -> TableReading | None:
        """Write this server's row and read the tables. Return None if the database fails or does not answer."""
        if self._exchange is None:
            self._exchange = asyncio.ensure_future(
                self._call(self._publish_and_read, self._own.row, self._own.summary, self._book.summary_versions)
            )
        # An unresponsive database occupies only one thread, because later beats wait for the same call.
        await asyncio.wait({self._exchange}, timeout=EXCHANGE_WAIT_S)
        trouble: object = "it does not answer"
        if self._exchange.done():
            exchange, self._exchange = self._exchange, None
            try:
                reading = exchange.result()
            except SQLAlchemyError as error:
                trouble = type(error).__name__
            else:
                self._is_database_lost = False
                return reading
        if not self._is_database_lost:
            self._is_database_lost = True
            log.warning("the table of replicas cannot be used; keeping the known replicas", reason=trouble)
        return None

    def _publish_and_read(self, row: ReplicaRow, summary: Summary, known: Mapping[str, int]) -> TableReading:
        if self._published_version < 0:
            self._table.remove_predecessors(row)
        self._table.publish(row, summary, has_changed=summary.version != self._published_version)
        self._published_version = summary.version
        for replica_id, beat in self._book.forgotten.items():
            self._table.remove(replica_id, beat)
        return self._table.read(known)

    def _accept(self, listed: frozenset[str]) -> None:
        own = self._certificates.in_use
        accepted = {name: peer.certificates for name, peer in self._book.peers.items()}
        if self._accepted != (own, accepted):
            self._accepted = (own, accepted)
            self._listener.accept_from(own, accepted)
        self._listener.end_all_but(listed)

    async def _connect(self, listed: frozenset[str]) -> None:
        """Open connections to new peers, and close connections to servers that are gone."""
        for name, peer in self._book.peers.items():
            if name in self._peers:
                self._peers[name].peer = peer
            else:
                engine = PeerEngine(
                    peer,
                    lambda: self._certificates.in_use,
                    self._metrics.count_refusal,
                    clock=self._clock,
                    strikes=self._strikes,
                )
                self._peers[name] = engine
                engine.follow()
        for name in self._peers.keys() - self._book.peers.keys():
            # A working connection to a listed server may still carry streams.
            if name not in listed or not self._peers[name].is_ready:
                await self._peers.pop(name).close()

    def _route(self) -> None:
        views = [self._own.view(self._clock())]
        for name, peer in self._book.peers.items():
            if self._peers[name].is_ready:
                holds = peer.holds if self._claims.is_trusted(name) else frozenset[int]()
                views.append(view_of(peer.row, holds, peer.since_s))
        self._draw.note_live({view.base_id for view in views if view.base_id is not None and not view.is_draining})
        self._engine.update(views, self._peers)
        self._count_peers(views)

    def _count_peers(self, views: list[ReplicaView]) -> None:
        peers = [view for view in views if not view.is_local]
        counts = {
            "connected": sum(not view.is_draining for view in peers),
            "draining": sum(view.is_draining for view in peers),
            "unreachable": len(self._book.peers) - len(peers),
            "refused": len(self._book.refused),
        }
        for state, count in counts.items():
            self._metrics.peers.labels(state).set(count)


def _report(row: ReplicaRow, view: ReplicaView, state: ReplicaState, now_s: float) -> ReplicaReport:
    age_s = now_s - view.since_s
    return report_of(view, row.address, state, age_s, row.num_pages, row.num_free_pages, is_own=view.is_local)
