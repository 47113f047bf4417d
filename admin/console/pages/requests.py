"""Live requests: what runs just now, and ending it."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from loramux.admin.console.live import LiveParts
from loramux.admin.console.panels import panel
from loramux.admin.console.visit import Visit

EVERY_S = 1.0
PAGE = 50


class Requests:
    """The page and its live part."""

    def __init__(self) -> None:
        self._live = LiveParts()

    async def show(self, visit: Visit) -> Response:
        return visit.page("requests.html", **await _facts(visit))

    async def live(self, visit: Visit) -> Response:
        async def render() -> str:
            return visit.site.templates.render("requests_live.html", **visit.frame(), **await _facts(visit))

        return self._live.stream(visit, EVERY_S, {"requests": render})

    async def cancel(self, visit: Visit) -> Response:
        request_id = visit.param("request_id")
        await visit.rest.post(f"/requests/{request_id}/cancel")
        if visit.is_partial:
            return visit.page("requests_live.html", **await _facts(visit))
        return visit.done("The request is being cancelled; what it made so far is paid for.")


async def _facts(visit: Visit) -> dict[str, Any]:
    tenant = visit.query("tenant")
    return {"tenant": tenant, "requests": await panel(visit.rest.get("/requests", tenant=tenant, limit=PAGE))}
