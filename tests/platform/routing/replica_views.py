"""Views of replicas and requests with defaults that do not matter to a test."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import replace

from loramux.platform.routing.views import ReplicaView, RoutingRequest, digest_prefix


class Clock:
    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


def digest_of(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def view(
    replica_id: str,
    *,
    load: float = 0.0,
    holds: Collection[str] = (),
    is_local: bool = False,
    is_draining: bool = False,
    pages_free_fraction: float = 1.0,
    capacity: int = 100,
    since_s: float = 0.0,
) -> ReplicaView:
    num_sequences = round(load * capacity)
    return ReplicaView(
        id=replica_id,
        is_local=is_local,
        num_running=min(num_sequences, capacity),
        num_waiting=max(0, num_sequences - capacity),
        capacity=capacity,
        pages_free_fraction=pages_free_fraction,
        is_draining=is_draining,
        holds=frozenset(digest_prefix(digest_of(name)) for name in holds),
        since_s=since_s,
    )


def ask(name: str | None, *, prefix: bytes | None = None, share: str = "acme", weight: int = 1) -> RoutingRequest:
    """A request for the adapter called `name`, or for the base model."""
    return RoutingRequest(
        digest=None if name is None else digest_of(name),
        prefix_key=prefix,
        share_key=share,
        weight=weight,
        num_prompt_tokens=4096,
        max_tokens=16,
    )


def reported_at(views: Sequence[ReplicaView], since_s: float) -> list[ReplicaView]:
    return [replace(one, since_s=since_s) for one in views]
