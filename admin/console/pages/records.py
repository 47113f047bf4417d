"""Pages that only show what the server has recorded: its findings about itself, its audit log and its jobs."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from loramux.admin.console.visit import Visit

AUDIT_FILTERS = ("tenant", "actor", "action", "target")
JOB_STATES = ("queued", "running", "succeeded", "failed")


async def health(visit: Visit) -> Response:
    """The findings of the server's self-check, and how to fix them."""
    server, findings = await asyncio.gather(visit.rest.get("/server"), visit.rest.get("/server/findings"))
    return visit.page("health.html", server=server, findings=findings["data"])


async def audit(visit: Visit) -> Response:
    """Who changed what, with the values before and after the change."""
    wanted = {name: visit.query(name) for name in AUDIT_FILTERS}
    page = await visit.rest.get("/audit_log", **wanted, limit=50, after=visit.query("after"))
    return visit.page("audit.html", entries=page, wanted=wanted)


async def jobs(visit: Visit) -> Response:
    """Validations of new versions, and their outcomes."""
    state, tenant = visit.query("state"), visit.query("tenant")
    page = await visit.rest.get("/jobs", state=state, tenant=tenant, limit=50, after=visit.query("after"))
    return visit.page("jobs.html", jobs=page, state=state, tenant=tenant, states=JOB_STATES)
