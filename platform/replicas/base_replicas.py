"""The replicas of one base, and the router that chooses among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from loramux.platform.routing.views import Prefetch, ReplicaView, RoutingRequest


class RequestRouter(Protocol):
    """The part of `routing.router.Router` that RoutedEngine uses."""

    def update(self, views: Sequence[ReplicaView]) -> None: ...

    def choose(self, request: RoutingRequest) -> str: ...

    def note_started(self, replica_id: str, request: RoutingRequest) -> None: ...

    def note_ended(self, replica_id: str, request: RoutingRequest) -> None: ...

    def prefetches(self) -> Sequence[Prefetch]: ...


class BaseReplicas:
    """The replicas of one base. `views` contains the views of the ready replicas. A lost replica is left out until the
    next update.
    """

    def __init__(self, base_id: str | None, router: RequestRouter) -> None:
        self.base_id = base_id
        self.router = router
        self.views: Sequence[ReplicaView] = ()

    def show(self, views: Sequence[ReplicaView]) -> None:
        self.views = views
        self.router.update(views)

    def leave_out(self, replica_id: str) -> None:
        self.show([view for view in self.views if view.id != replica_id])
