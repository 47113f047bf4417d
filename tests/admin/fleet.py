"""A fleet of scripted engines, as seen by the server `rep_own`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loramux.engine.protocol.messages import Stats, StatsRequest
from loramux.platform.engine_link.engine_client import EngineClient, EngineUnavailable
from loramux.platform.replicas.reports import ReplicaFigures, ReplicaReport, ReplicaState, UnknownReplica

OWN, PEER, SILENT, STRANGER = "rep_own", "rep_peer", "rep_silent", "rep_stranger"
BASE_ID = "b" * 64


class ScriptedFleet:
    """This server, a peer, a peer whose engine does not answer, and a server of another base."""

    def __init__(self, own: EngineClient, peer: EngineClient) -> None:
        self.engines: Mapping[str, EngineClient] = {}
        self.measured: Mapping[str, EngineClient] = {}
        self._engines = {OWN: own, PEER: peer}

    def reports(self) -> Sequence[ReplicaReport]:
        return (
            _report(OWN, "serving", 2),
            _report(PEER, "draining", 5),
            _report(SILENT, "unreachable", 0),
            ReplicaReport(
                id=STRANGER, address=None, base_id=None, is_own=False, state="refused", reason="it serves another base"
            ),
        )

    async def stats_of(self, replica_id: str, timeout_s: float, with_tiers: bool) -> Stats:
        if replica_id == SILENT:
            raise EngineUnavailable("the engine is not running")
        if replica_id not in self._engines:
            raise UnknownReplica(replica_id)
        return await self._engines[replica_id].call(StatsRequest(with_tiers=with_tiers), timeout_s)


def _report(replica_id: str, state: ReplicaState, num_running: int) -> ReplicaReport:
    return ReplicaReport(
        id=replica_id,
        address=f"10.0.0.{num_running}:8002",
        base_id=BASE_ID,
        is_own=replica_id == OWN,
        state=state,
        age_s=0.5,
        figures=ReplicaFigures(
            num_running=num_running, num_waiting=1, capacity=8, num_pages=100, num_free_pages=40, num_adapters=3
        ),
    )
