"""The replicas of a cluster, as one gateway uses them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from importlib.metadata import version
from types import MappingProxyType

import structlog

from loramux.engine.protocol.messages import PROTOCOL, Stats, StatsRequest
from loramux.platform.base_draw import BaseDraw
from loramux.platform.cluster.replica_calls import ListedReplica, ReplicaCalls
from loramux.platform.cluster.replica_engine import ReplicaEngine
from loramux.platform.cluster.replica_report import (
    HeldState,
    ReplicaIdentity,
    ReportRefused,
    read_identity,
    read_state,
)
from loramux.platform.engine_link.crash_strikes import CrashStrikes
from loramux.platform.engine_link.engine_client import EngineClient
from loramux.platform.replicas.engine_group import NO_ENGINE_ID, EngineGroup
from loramux.platform.replicas.reports import ReplicaReport, ReplicaState, UnknownReplica, refused_reports, report_of
from loramux.platform.replicas.routed_engine import RoutedEngine
from loramux.platform.routing.routers import RequestRouter
from loramux.platform.routing.views import ReplicaView
from loramux.platform.telemetry.package_metrics import ReplicaMetrics

NO_REPLICA = "no replica of the cluster is ready"

BEAT_S = 1.0
"""Interval, in seconds, at which the router gets new views, although Ray Serve sends only changes."""
CONNECTING_BEAT_S = 0.1
"""The interval, in seconds, while the gateway connects to a replica, which takes requests after the next beat."""

log = structlog.get_logger()


class _Replica:
    """A replica that this gateway uses."""

    def __init__(self, replica_id: str, identity: ReplicaIdentity, engine: ReplicaEngine) -> None:
        self.id = replica_id
        self.identity = identity
        self.engine = engine
        self.state = HeldState()
        self.holds: frozenset[int] = frozenset()
        self.is_leaving = False
        """True once the cluster stops the replica, or the gateway refuses it."""
        self.is_draining = False
        self.since_s = 0.0

    def view(self) -> ReplicaView:
        identity, num_sequences = self.identity, self.state.num_sequences
        return ReplicaView(
            id=self.id,
            is_local=False,
            base_id=identity.base_id,
            num_running=min(num_sequences, identity.capacity),
            num_waiting=max(0, num_sequences - identity.capacity),
            capacity=identity.capacity,
            pages_free_fraction=min(1.0, self.state.num_free_pages / max(1, identity.num_pages)),
            is_draining=self.is_draining,
            holds=self.holds,
            since_s=self.since_s,
        )

    def report(self, now_s: float) -> ReplicaReport:
        state: ReplicaState = "draining" if self.is_draining else "serving" if self.engine.is_ready else "unreachable"
        pages = self.identity.num_pages, self.state.num_free_pages
        return report_of(self.view(), self.identity.host, state, now_s - self.since_s, *pages)


class ClusterFleet:
    """Connects to the replicas that the cluster lists, and runs sequences on those that a router chooses.

    A replica of another version, or with another base than `draw.own`, is refused. Among replicas of this base, those
    that differ in dtype, quantisation or page size from the replicas in use are refused as long as one of these is
    listed, because equal requests would get different answers.

    This takes the place of `Sharing` in a server whose engines run in a cluster. `engine` runs its sequences, and
    `cluster` has the replicas' engines.
    """

    address = None
    # A gateway of a cluster runs no sequences for other gateways.
    open_presence = None
    engines: Mapping[str, EngineClient] = MappingProxyType({})

    def __init__(
        self,
        calls: ReplicaCalls,
        cluster: EngineGroup,
        new_router: Callable[[], RequestRouter],
        draw: BaseDraw,
        metrics: ReplicaMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls = calls
        self._cluster = cluster
        self.engine = RoutedEngine(
            cluster,
            NO_ENGINE_ID,
            new_router,
            metrics.count_forwarded,
            metrics.base_fallbacks.inc,
            base_id=draw.own,
        )
        self._draw = draw
        self._metrics = metrics
        self._clock = clock
        self._strikes = CrashStrikes(clock)
        self._listed: tuple[ListedReplica, ...] = ()
        self._replicas: dict[str, _Replica] = {}
        self._refused: dict[str, str] = {}
        self._fingerprint: str | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def measured(self) -> Mapping[str, EngineClient]:
        """Implements `Fleet.measured`."""
        return self._cluster.engines

    def follow(self) -> None:
        """Follow the cluster until `close`."""
        self._calls.watch(self.note)
        self._run(self._beat_forever(), "cluster-beat")

    async def close(self) -> None:
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await asyncio.gather(*(replica.engine.close() for replica in self._replicas.values()))
        self._calls.keep(frozenset())

    def note(self, listed: tuple[ListedReplica, ...]) -> None:
        """Note the replicas that accept requests, as the cluster lists them."""
        self._listed = listed
        names = {one.id for one in listed}
        accepted = self._accepted(listed)
        for one, identity in accepted:
            replica = self._replicas.get(one.id)
            if replica is None:
                engine = ReplicaEngine(
                    self._calls, one.id, identity, self._metrics.count_refusal, self._clock, self._strikes
                )
                replica = self._replicas[one.id] = _Replica(one.id, identity, engine)
                engine.follow()
                log.info("a replica was found", replica=one.id)
            self._note_state(replica, one)
        for name, replica in self._replicas.items():
            replica.is_leaving = name not in names or name in self._refused
        self._calls.keep(frozenset(self._replicas))
        self.beat()

    def beat(self) -> None:
        """Close replicas that have drained, and tell the router which replicas can run sequences.

        A replica that is being stopped takes sequences until a listed replica is ready. It ends only when this gateway
        closes its session.
        """
        now_s = self._clock()
        others = [one for one in self._replicas.values() if not one.is_leaving]
        is_needed = bool(others) and not any(one.engine.is_ready for one in others)
        for name, replica in list(self._replicas.items()):
            replica.is_draining = replica.is_leaving and not is_needed
            if replica.is_draining and replica.engine.num_sequences == 0:
                del self._replicas[name]
                self._cluster.stats.forget(name)
                self._calls.keep(frozenset(self._replicas))
                self._run(replica.engine.close(), "replica-closing")
            replica.since_s = now_s
        ready = {name: replica for name, replica in self._replicas.items() if replica.engine.is_ready}
        used = {name: one.engine for name, one in self._replicas.items() if not one.is_draining}
        self._cluster.show(used, self._trouble())
        self._draw.note_live({one.identity.base_id for one in ready.values() if not one.is_draining})
        engines = {name: one.engine for name, one in ready.items()}
        self.engine.update([one.view() for one in ready.values()], engines)
        states = Counter(one.report(now_s).state for one in self._replicas.values())
        counts = {"connected": states["serving"], "draining": states["draining"], "unreachable": states["unreachable"]}
        for state, count in {**counts, "refused": len(self._refused)}.items():
            self._metrics.peers.labels(state).set(count)

    def capacity(self) -> int:
        """Return how many sequences the ready replicas can run at once."""
        return sum(one.identity.capacity for one in self._replicas.values() if one.engine.is_ready)

    def reports(self) -> Sequence[ReplicaReport]:
        """Report on the replicas in use first, then on the refused replicas, each sorted by identifier."""
        now_s = self._clock()
        found = [replica.report(now_s) for _, replica in sorted(self._replicas.items())]
        return found + refused_reports(self._refused)

    async def stats_of(self, replica_id: str, timeout_s: float, with_tiers: bool) -> Stats:
        """Return the statistics of a replica's engine. Raises UnknownReplica, EngineUnavailable or TimeoutError."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            raise UnknownReplica(replica_id)
        return await replica.engine.call(StatsRequest(with_tiers=with_tiers), timeout_s)

    def _accepted(self, listed: Sequence[ListedReplica]) -> list[tuple[ListedReplica, ReplicaIdentity]]:
        identities: list[tuple[ListedReplica, ReplicaIdentity]] = []
        refused: dict[str, tuple[str, str]] = {}
        for one in listed:
            try:
                identity = read_identity(one.identity)
            except ReportRefused as error:
                refused[one.id] = ("malformed", str(error))
                continue
            problem = self._problem(identity)
            if problem is None:
                identities.append((one, identity))
            else:
                refused[one.id] = problem
        bases = [identity.base for _, identity in identities]
        if bases and self._fingerprint not in bases:
            self._fingerprint = Counter(bases).most_common(1)[0][0]
        for one, identity in identities:
            if identity.base != self._fingerprint:
                reason = "it serves the base in another dtype, quantisation or page size than the replicas in use"
                refused[one.id] = ("base", reason)
        for name, (reason, sentence) in refused.items():
            if self._refused.get(name) != sentence:
                log.warning("a replica is refused", replica=name, reason=sentence)
                self._metrics.count_refusal(reason)
        self._refused = {name: sentence for name, (_, sentence) in refused.items()}
        return [(one, identity) for one, identity in identities if one.id not in refused]

    def _problem(self, identity: ReplicaIdentity) -> tuple[str, str] | None:
        if identity.protocol != PROTOCOL:
            return "protocol", f"it speaks protocol {identity.protocol}, but this gateway speaks {PROTOCOL}"
        if identity.version != version("loramux"):
            return "version", f"it runs loramux {identity.version}, but this gateway runs {version('loramux')}"
        if identity.base_id != self._draw.own:
            return "base", "it serves another base model than this gateway"
        return None

    def _note_state(self, replica: _Replica, listed: ListedReplica) -> None:
        try:
            replica.state, replica.holds = read_state(listed.state)
        except ReportRefused as error:
            log.warning("a replica's report is ignored", replica=listed.id, reason=str(error))
            self._metrics.count_refusal("summary")

    def _trouble(self) -> str | None:
        if self._calls.trouble is not None:
            return self._calls.trouble
        if self._refused:
            name, reason = min(self._refused.items())
            return f"{NO_REPLICA}; {name} is refused: {reason}"
        if not self._listed:
            return "the cluster runs no replica: start them with 'loramux cluster up'"
        troubles = (replica.engine.trouble for replica in self._replicas.values())
        return next((f"{NO_REPLICA}: {trouble}" for trouble in troubles if trouble), None)

    async def _beat_forever(self) -> None:
        while True:
            is_connecting = any(not one.engine.is_ready for one in self._replicas.values())
            await asyncio.sleep(CONNECTING_BEAT_S if is_connecting else BEAT_S)
            try:
                self.beat()
            except Exception:
                # Requests do not depend on this loop, so an error here must not end the gateway.
                log.exception("a beat failed")

    def _run(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
