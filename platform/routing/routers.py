"""The routers that can be chosen by name, and the interface that they implement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol, runtime_checkable

from loramux.adapter_store.extensions import ExtensionKind
from loramux.platform.routing.views import Prefetch, ReplicaView, RoutingRequest

HOMES = "homes"
"""The name of `router.Router`, which sends each adapter's requests to the adapter's homes."""


@runtime_checkable
class RequestRouter(Protocol):
    """Chooses the replica that runs each request of one base. Called only on the event loop, so it must not block."""

    def update(self, views: Sequence[ReplicaView]) -> None:
        """Replace the views of all replicas. Called at least once before `choose`, and after each report."""
        ...

    def choose(self, request: RoutingRequest) -> str:
        """Return the ID of one of the replicas in the last `update` that are not draining.

        Raises NoReplica if there is none.
        """
        ...

    def note_started(self, replica_id: str, request: RoutingRequest) -> None:
        """Note that a request was sent to a replica, which need not be the one that `choose` returned."""
        ...

    def note_ended(self, replica_id: str, request: RoutingRequest) -> None:
        """Note the end of a request. Called exactly once for each `note_started`, perhaps after the replica is gone."""
        ...

    def prefetches(self) -> Sequence[Prefetch]:
        """Return the adapters that replicas should load now. Called after each `update`."""
        ...


ROUTERS = ExtensionKind[RequestRouter]("routers", "router", RequestRouter, taken=(HOMES,))
"""Routers of extensions. Each is called with `clock`, a monotonic clock in seconds, and `random`, once per base."""


def router_names() -> tuple[str, ...]:
    """Return the names that `new_router` knows. Raises ExtensionRefused."""
    return (HOMES, *ROUTERS.names)


def new_router(name: str, *, clock: Callable[[], float], random: Random) -> RequestRouter:
    """Create a router. Raises ExtensionRefused, also if there is no router of this name."""
    if name == HOMES:
        # Servers that do not share requests know the names of routers, but need none.
        from loramux.platform.routing.router import Router

        return Router(clock=clock, random=random)
    return ROUTERS.required(name, clock=clock, random=random)
