"""Health: the findings of the server's self-check, and how to fix them."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from loramux.admin.console.visit import Visit


async def show(visit: Visit) -> Response:
    server, findings = await asyncio.gather(visit.rest.get("/server"), visit.rest.get("/server/findings"))
    return visit.page("health.html", server=server, findings=findings["data"])
