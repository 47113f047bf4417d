"""Connects the request routers that Ray Serve creates with the gateways of this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from loramux.platform.cluster.replica_calls import ListedReplica

Watcher = Callable[[tuple[ListedReplica, ...]], None]


class RouterHub:
    """Connects the request router that Ray Serve creates for a deployment with the gateway that uses the deployment.

    `watchers` receive the listed replicas on Ray Serve's thread. `kept` are the replicas with sessions of a gateway of
    this process.
    """

    def __init__(self) -> None:
        self.watchers: list[Watcher] = []
        self.kept: Mapping[int, frozenset[str]] = {}
        self.last: tuple[ListedReplica, ...] | None = None

    def show(self, replicas: tuple[ListedReplica, ...]) -> None:
        self.last = replicas
        for watcher in self.watchers:
            watcher(replicas)

    def is_kept(self, replica_id: str) -> bool:
        return any(replica_id in kept for kept in self.kept.values())


HUBS: dict[str, RouterHub] = {}
"""The hubs of the applications that this process uses, by name. Ray Serve passes no object to a request router."""
