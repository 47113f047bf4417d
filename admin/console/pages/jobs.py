"""Jobs: validations of new versions, and their outcomes."""

from __future__ import annotations

from starlette.responses import Response

from loramux.admin.console.visit import Visit

STATES = ("queued", "running", "succeeded", "failed")


async def show(visit: Visit) -> Response:
    state, tenant = visit.query("state"), visit.query("tenant")
    page = await visit.rest.get("/jobs", state=state, tenant=tenant, limit=50, after=visit.query("after"))
    return visit.page("jobs.html", jobs=page, state=state, tenant=tenant, states=STATES)
