"""The policies that the router is compared with."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from loramux.platform.routing.router import Router
from loramux.platform.routing.views import Prefetch, ReplicaView, RoutingRequest, digest_prefix

VIRTUAL_NODES = 160
"""Number of points of each replica on the ring for consistent hashing."""

BALANCE = 1.25
"""Highest load that bounded-load hashing allows a replica, relative to the mean load."""


class Policy(Protocol):
    """The part of `Router`'s interface that the simulation uses."""

    def update(self, views: Sequence[ReplicaView]) -> None: ...

    def choose(self, request: RoutingRequest) -> str: ...

    def note_started(self, replica_id: str, request: RoutingRequest) -> None: ...

    def note_ended(self, replica_id: str, request: RoutingRequest) -> None: ...

    def prefetches(self) -> Sequence[Prefetch]: ...


class RandomChoice:
    """Chooses a random replica that is not draining. Also counts each replica's sequences for its subclasses."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._views: dict[str, ReplicaView] = {}
        self._serving: list[str] = []
        self._num_own: dict[str, int] = {}
        self._num_reported: dict[str, int] = {}

    def update(self, views: Sequence[ReplicaView]) -> None:
        for view in views:
            before = self._views.get(view.id)
            if before is None or before.since_s != view.since_s:
                self._num_reported[view.id] = self._num_own.get(view.id, 0)
        self._views = {view.id: view for view in views if not view.is_draining}
        if self._serving != list(self._views):
            self._serving = list(self._views)
            self._replicas_changed()

    def choose(self, request: RoutingRequest) -> str:
        return self._random.choice(self._serving)

    def note_started(self, replica_id: str, request: RoutingRequest) -> None:
        self._num_own[replica_id] = self._num_own.get(replica_id, 0) + 1

    def note_ended(self, replica_id: str, request: RoutingRequest) -> None:
        self._num_own[replica_id] -= 1

    def prefetches(self) -> Sequence[Prefetch]:
        return ()

    def _replicas_changed(self) -> None:
        pass

    def _num_sequences(self, replica_id: str) -> int:
        view = self._views[replica_id]
        unreported = self._num_own.get(replica_id, 0) - self._num_reported[replica_id]
        return max(0, view.num_running + view.num_waiting + unreported)


class ConsistentHash(RandomChoice):
    """Chooses the replica of the first point at or after the adapter's digest on a ring (Karger et al., 1997)."""

    def _replicas_changed(self) -> None:
        self._ring = sorted(
            (int.from_bytes(hashlib.sha256(f"{replica_id}/{point}".encode()).digest()[:8], "big"), replica_id)
            for replica_id in self._serving
            for point in range(VIRTUAL_NODES)
        )

    def choose(self, request: RoutingRequest) -> str:
        return self._ring[self._first(request)][1]

    def _first(self, request: RoutingRequest) -> int:
        assert request.digest is not None
        return bisect_left(self._ring, (digest_prefix(request.digest), "")) % len(self._ring)


class BoundedLoadHash(ConsistentHash):
    """Chooses the first replica on the ring with room (Mirrokni et al., "Consistent Hashing with Bounded Loads",
    2018)."""

    def choose(self, request: RoutingRequest) -> str:
        num_sequences = sum(map(self._num_sequences, self._serving))
        limit = math.ceil(BALANCE * (num_sequences + 1) / len(self._serving))
        first = self._first(request)
        full: set[str] = set()
        for step in range(len(self._ring)):
            replica_id = self._ring[(first + step) % len(self._ring)][1]
            if replica_id in full:
                continue
            if self._num_sequences(replica_id) < limit:
                return replica_id
            full.add(replica_id)
        raise AssertionError("some replica is always below the mean")


class ResidencyOnly(RandomChoice):
    """Chooses the least loaded replica that holds the adapter, or else the less loaded of two random replicas."""

    def choose(self, request: RoutingRequest) -> str:
        assert request.digest is not None
        prefix = digest_prefix(request.digest)
        holders = [replica_id for replica_id in self._serving if prefix in self._views[replica_id].holds]
        return min(holders or self._random.sample(self._serving, 2), key=self._num_sequences)


POLICIES: dict[str, Callable[[Callable[[], float], Random], Policy]] = {
    "random": lambda _clock, random: RandomChoice(random),
    "consistent hash": lambda _clock, random: ConsistentHash(random),
    "bounded-load hash": lambda _clock, random: BoundedLoadHash(random),
    "residency only": lambda _clock, random: ResidencyOnly(random),
    "router": lambda clock, random: Router(clock=clock, random=random),
}
