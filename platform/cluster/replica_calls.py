"""The interface between a gateway and the cluster that runs its replicas. Only its implementation imports Ray."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class ReplicaGone(Exception):
    """The cluster has no such replica any more."""

    def __init__(self, replica_id: str) -> None:
        super().__init__(f"the cluster has no replica {replica_id} any more")


class CallFailed(Exception):
    """A call to a replica failed. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedReplica:
    """A replica as the cluster lists it."""

    id: str
    identity: Mapping[str, Any]
    state: Mapping[str, Any]


NoteReplicas = Callable[[tuple[ListedReplica, ...]], None]


class ReplicaCalls(Protocol):
    """Calls replicas by their identifier. Every call raises ReplicaGone, or another exception if it fails."""

    @property
    def trouble(self) -> str | None:
        """Why the cluster cannot be reached, in one sentence. None if it can."""

    def watch(self, note: NoteReplicas) -> None:
        """Call `note` on this event loop with the replicas that accept requests: once they are known, and after each
        change.
        """

    def keep(self, replica_ids: frozenset[str]) -> None:
        """Go on to reach these replicas while the cluster stops them, although it lists them no more."""

    def session(self, replica_id: str, session_id: str) -> AsyncGenerator[bytes, None]:
        """Open a session. Yields the bytes that the replica sends. Closing the generator ends the session."""
        ...

    async def send(self, replica_id: str, session_id: str, offset: int, data: bytes) -> None:
        """Send bytes in a session. `offset` is the number of bytes sent before, because a call can arrive twice."""
