"""Ray Serve's hook for choosing replicas. It only carries out choices: `replicas/routed_engine.py` makes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from loramux.platform.cluster import router_hub
from loramux.platform.cluster.replica_calls import ListedReplica, ReplicaGone


class TunnelRouter(RequestRouter):
    """Sends each call to the replica that the handle's option `session_id` names, and lists the replicas to the hub.

    Gateways choose a replica for each sequence themselves, because the choice needs the gateway's own sequences, and
    because a sequence that has started must not be repeated. A replica that is being stopped is not listed, but it is
    reached as long as a gateway has a session with it, so that its sequences still end.

    Ray Serve copies this module into every process, so it refers to the hubs through their module.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        hub = router_hub.HUBS.get(self.app_name)
        listed = {replica.replica_id for replica in replicas}
        stopping = [
            replica
            for replica_id, replica in self.curr_replicas.items()
            if replica_id not in listed and hub is not None and hub.is_kept(replica_id.unique_id)
        ]
        super().update_replicas([*replicas, *stopping])
        self._listed = listed
        self._show()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._show()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return one rank with one replica. If the replica is gone, the call fails with ReplicaGone."""
        if pending_request is None:
            return [candidate_replicas]
        replica_id = pending_request.metadata.session_id
        found = [replica for replica in candidate_replicas if replica.replica_id.unique_id == replica_id]
        if not found:
            if not pending_request.future.done():
                pending_request.future.set_exception(ReplicaGone(replica_id))
            # Ray Serve notices only after a rank that the request is done.
            return [candidate_replicas]
        # If the replica does not answer, Ray Serve asks again after a pause.
        pending_request.routing_context.should_backoff = True
        return [found]

    def _show(self) -> None:
        hub = router_hub.HUBS.get(self.app_name)
        if hub is not None:
            replicas = self.curr_replicas.items()
            hub.show(tuple(_listed(replica) for replica_id, replica in replicas if replica_id in self._listed))


def _listed(replica: RunningReplica) -> ListedReplica:
    identity: Mapping[str, Any] = replica.replica_metadata
    state: Mapping[str, Any] = replica.routing_stats
    return ListedReplica(id=replica.replica_id.unique_id, identity=dict(identity), state=dict(state))
