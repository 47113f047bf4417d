"""Reports for operators about the servers that share requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from loramux.engine.protocol.messages import Stats
from loramux.platform.engine_link.engine_client import EngineClient
from loramux.platform.routing.views import ReplicaView

ReplicaState = Literal["serving", "draining", "unreachable", "refused"]


class UnknownReplica(Exception):
    """No server with this identifier shares requests with this server, and none of its engines has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFigures:
    """A server's load and memory, as it last published them."""

    num_running: int
    num_waiting: int
    capacity: int
    num_pages: int
    num_free_pages: int
    num_adapters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """One server, or one of the engines of this server. A refused server has a `reason` and no figures, because its
    claims are not used. An engine that is not ready has no figures either.
    """

    id: str
    address: str | None
    base_id: str | None
    is_own: bool
    state: ReplicaState
    reason: str | None = None
    age_s: float | None = None
    """Seconds since the reporting server last saw a new beat of this server, by the reporting server's clock."""
    figures: ReplicaFigures | None = None


class Fleet(Protocol):
    """The servers that share requests, as seen by one of them, or the engines of a server with several."""

    @property
    def engines(self) -> Mapping[str, EngineClient]:
        """This server's engines by the identifiers of their reports, if it has several. Otherwise empty."""

    @property
    def measured(self) -> Mapping[str, EngineClient]:
        """The engines whose metrics this server exports one by one: its own, if it has several, or those of its cluster
        at this moment. A sum over a cluster would lose the counts of its earlier replicas when this server restarts.
        """

    def reports(self) -> Sequence[ReplicaReport]:
        """Report on this server, or on its engines if it has several, then on its peers, then on refused servers. Empty
        if this server has one engine and does not share requests.
        """

    async def stats_of(self, replica_id: str, timeout_s: float, with_tiers: bool) -> Stats:
        """Return the statistics of a server's engine. Raises UnknownReplica, EngineUnavailable or TimeoutError."""
        ...


def report_of(
    view: ReplicaView,
    address: str | None,
    state: ReplicaState,
    age_s: float,
    num_pages: int,
    num_free_pages: int,
    is_own: bool = False,
) -> ReplicaReport:
    return ReplicaReport(
        id=view.id,
        address=address,
        base_id=view.base_id,
        is_own=is_own,
        state=state,
        age_s=age_s,
        figures=ReplicaFigures(
            num_running=view.num_running,
            num_waiting=view.num_waiting,
            capacity=view.capacity,
            num_pages=num_pages,
            num_free_pages=num_free_pages,
            num_adapters=len(view.holds),
        ),
    )


def refused_reports(refused: Mapping[str, str]) -> list[ReplicaReport]:
    """Report on refused servers or replicas, which are given with the reasons, sorted by identifier."""
    return [
        ReplicaReport(id=name, address=None, base_id=None, is_own=False, state="refused", reason=reason)
        for name, reason in sorted(refused.items())
    ]
