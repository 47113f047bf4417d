"""A cluster without Ray: replicas with scripted engines in this process, called as through Ray Serve."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq.asyncio

from loramux.platform.base_draw import BaseDraw
from loramux.platform.cluster.cluster_fleet import NO_REPLICA, ClusterFleet
from loramux.platform.cluster.gateway_sessions import GatewaySessions
from loramux.platform.cluster.replica_calls import ListedReplica, NoteReplicas, ReplicaGone
from loramux.platform.cluster.replica_report import HeldState, ReplicaIdentity, as_values
from loramux.platform.replicas.engine_group import EngineGroup
from loramux.platform.replicas.routed_engine import RoutedEngine
from loramux.platform.telemetry.metrics import GatewayMetrics
from tests.platform.replicas.lab import ChosenRouter
from tests.platform.replicas.served_engine import ServedEngine
from tests.platform.scripted_engine import ScriptedEngine


@dataclass
class ReplicaHere:
    scripted: ScriptedEngine
    served: ServedEngine
    sessions: GatewaySessions
    identity: ReplicaIdentity
    state: HeldState = field(default_factory=HeldState)
    is_listed: bool = True
    has_died: asyncio.Event = field(default_factory=asyncio.Event)


class CallsHere:
    """Implements ReplicaCalls. With `sends_twice`, each call to `send` arrives twice, as after a retry of Ray."""

    def __init__(self, directory: Path) -> None:
        self.replicas: dict[str, ReplicaHere] = {}
        self.kept: frozenset[str] = frozenset()
        self.sends_twice = False
        self.context = zmq.asyncio.Context()
        self._directory = directory
        self._note: NoteReplicas | None = None

    def open(self, name: str, **identity: Any) -> ReplicaHere:
        scripted = ScriptedEngine()
        assert scripted.info is not None
        served = ServedEngine(scripted, self._directory / f"{name}.sock", takes_pins=True)
        found = msgspec.structs.replace(ReplicaIdentity.of(scripted.info, 8), **identity)
        replica = self.replicas[name] = ReplicaHere(scripted, served, GatewaySessions(served, self.context), found)
        self.list()
        return replica

    def kill(self, name: str) -> None:
        """End the replica as SIGKILL does: its calls fail, and the cluster stops listing it."""
        replica = self.replicas[name]
        replica.has_died.set()
        self.stop(name)

    def stop(self, name: str) -> None:
        """Begin to stop the replica: the cluster does not list it any more."""
        self.replicas[name].is_listed = False
        self.list()

    def list(self) -> None:
        if self._note is not None:
            self._note(
                tuple(
                    ListedReplica(id=name, identity=as_values(one.identity), state=as_values(one.state))
                    for name, one in self.replicas.items()
                    if one.is_listed
                )
            )

    @property
    def trouble(self) -> str | None:
        return None

    def watch(self, note: NoteReplicas) -> None:
        self._note = note
        self.list()

    def keep(self, replica_ids: frozenset[str]) -> None:
        self.kept = replica_ids

    async def session(self, replica_id: str, session_id: str) -> AsyncGenerator[bytes, None]:
        replica = self._reached(replica_id)
        death = asyncio.create_task(replica.has_died.wait())
        async with aclosing(replica.sessions.run(session_id)) as stream:
            while True:
                item = asyncio.ensure_future(anext(stream, None))
                await asyncio.wait((item, death), return_when=asyncio.FIRST_COMPLETED)
                if death.done():
                    item.cancel()
                    await asyncio.wait((item,))
                    raise RuntimeError("the replica has died")
                data = item.result()
                if data is None:
                    death.cancel()
                    return
                yield data

    async def send(self, replica_id: str, session_id: str, offset: int, data: bytes) -> None:
        await asyncio.sleep(0)
        for _ in range(1 + self.sends_twice):
            self._reached(replica_id).sessions.receive(session_id, offset, data)

    def _reached(self, replica_id: str) -> ReplicaHere:
        replica = self.replicas.get(replica_id)
        is_reachable = replica is not None and not replica.has_died.is_set()
        if replica is None or not is_reachable or not (replica.is_listed or replica_id in self.kept):
            raise ReplicaGone(replica_id)
        return replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    calls: CallsHere
    fleet: ClusterFleet
    engine: RoutedEngine
    calls_of_none: EngineGroup
    router: ChosenRouter
    metrics: GatewayMetrics

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def open_cluster(directory: Path) -> AsyncIterator[Cluster]:
    """Open a gateway of a cluster without replicas."""
    calls, none, metrics, router = CallsHere(directory), EngineGroup(NO_REPLICA), GatewayMetrics(), ChosenRouter()
    fleet = ClusterFleet(calls, none, lambda: router, BaseDraw("", None), metrics.replicas, time.monotonic)
    fleet.follow()
    try:
        yield Cluster(calls=calls, fleet=fleet, engine=fleet.engine, calls_of_none=none, router=router, metrics=metrics)
    finally:
        await fleet.close()
        for replica in calls.replicas.values():
            replica.served.close()
        calls.context.destroy(linger=0)
