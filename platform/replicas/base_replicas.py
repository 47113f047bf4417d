"""The replicas of one base, and the router that chooses among them."""

from __future__ import annotations

from collections.abc import Sequence

from loramux.platform.routing.routers import RequestRouter
from loramux.platform.routing.views import ReplicaView


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
