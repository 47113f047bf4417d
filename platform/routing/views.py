"""The records that a router receives and returns."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass


class NoReplica(Exception):
    """No replica accepts requests, because none is known or all are draining."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """The latest report of one replica, as one reader received it.

    Reports may be seconds old. They are only hints, because the engine itself decides which adapters it holds and when
    a request runs.
    """

    id: str
    is_local: bool
    """True for this server's own engine, which needs no forwarding."""
    base_id: str | None = None
    """The base that the engine serves. A router gets the views of only one base."""
    num_running: int
    num_waiting: int
    capacity: int
    """Maximum number of sequences that the engine runs at once. It is at least 1."""
    pages_free_fraction: float
    """Fraction of pages that are available to new requests: free pages, and pages of idle adapters and prefixes."""
    is_draining: bool
    holds: Set[int]
    """`digest_prefix` of each resident adapter. Adapters that are being loaded are not included."""
    since_s: float
    """When this reader received the report, by its own monotonic clock. A later value marks a new report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRequest:
    digest: str | None
    """The adapter's digest, in hexadecimal. None means the base model."""
    prefix_key: bytes | None
    """A key that is equal for requests that can share cached pages, such as the turns of a conversation."""
    share_key: str
    weight: int
    num_prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefetch:
    """An adapter that a replica should load before requests for it arrive."""

    replica_id: str
    digest: str


def digest_prefix(digest: str) -> int:
    """Return the first 64 bits of a hexadecimal digest, which replicas use to report the adapters that they hold."""
    return int(digest[:16], 16)
