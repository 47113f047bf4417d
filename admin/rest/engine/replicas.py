"""`/replicas`: the servers that share requests, or a server's engines, with their load and memory."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from typing_extensions import TypedDict

from loramux.admin.rest.access import PlatformReader, Services
from loramux.admin.rest.listing import ListDocument, whole_list
from loramux.platform.replicas.reports import ReplicaReport

router = APIRouter(prefix="/replicas", tags=["replicas"])


class ReplicaDocument(TypedDict):
    """One server, or an engine of this server, as it last described itself. Figures are null for a refused server and
    for an engine that is not ready, which have a `reason` instead.

    `num_free_pages` includes the pages of idle adapters and idle cached prefixes. `age_s` is the age of the
    description.
    """

    object: Literal["replica"]
    id: str
    address: str | None
    base_id: str | None
    is_own: bool
    state: Literal["serving", "draining", "unreachable", "refused"]
    reason: str | None
    age_s: float | None
    num_running: int | None
    num_waiting: int | None
    capacity: int | None
    num_pages: int | None
    num_free_pages: int | None
    num_adapters: int | None


@router.get("")
async def list_replicas(services: Services, caller: PlatformReader) -> ListDocument[ReplicaDocument]:
    """List this server and the servers that it shares requests with, or this server's engines if it has several. The
    list is empty if this server has one engine and does not share requests (`peer_address`).

    A server is `unreachable` if it publishes its state but no connection to it is open, and an engine of this server
    while it is not ready. A server is `refused` if its base, version or certificate does not match. Servers that have
    stopped publishing are not listed.
    """
    reports = () if services.engine.fleet is None else services.engine.fleet.reports()
    return whole_list([_describe(report) for report in reports])


def _describe(report: ReplicaReport) -> ReplicaDocument:
    figures = report.figures
    return {
        "object": "replica",
        "id": report.id,
        "address": report.address,
        "base_id": report.base_id,
        "is_own": report.is_own,
        "state": report.state,
        "reason": report.reason,
        "age_s": None if report.age_s is None else round(report.age_s, 3),
        "num_running": None if figures is None else figures.num_running,
        "num_waiting": None if figures is None else figures.num_waiting,
        "capacity": None if figures is None else figures.capacity,
        "num_pages": None if figures is None else figures.num_pages,
        "num_free_pages": None if figures is None else figures.num_free_pages,
        "num_adapters": None if figures is None else figures.num_adapters,
    }
