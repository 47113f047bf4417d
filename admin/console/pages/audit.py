"""Audit: who changed what, with the values before and after the change."""

from __future__ import annotations

from starlette.responses import Response

from loramux.admin.console.visit import Visit

FILTERS = ("tenant", "actor", "action", "target")


async def show(visit: Visit) -> Response:
    wanted = {name: visit.query(name) for name in FILTERS}
    page = await visit.rest.get("/audit_log", **wanted, limit=50, after=visit.query("after"))
    return visit.page("audit.html", entries=page, wanted=wanted)
