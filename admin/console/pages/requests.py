"""Live requests: listing the requests in flight, and cancelling them."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from loramux.admin.console.confirmation import Confirmation, counted
from loramux.admin.console.formats import duration
from loramux.admin.console.panels import panel
from loramux.admin.console.rest_calls import RestError
from loramux.admin.console.visit import Visit

EVERY_S = 1.0
PAGE = 50


async def confirm_cancel(visit: Visit) -> Response:
    """Show the effects of cancelling a request, or that the request has already ended."""
    request_id = visit.param("request_id")
    try:
        found = await visit.rest.get(f"/requests/{request_id}")
    except RestError as error:
        if error.status != 404:
            raise
        return visit.done("The request has already ended: see Usage.", "/requests")
    return Confirmation(
        title="Cancel a request",
        before=f"{found['model']} is answering {found['tenant']}, with "
        f"{counted(found['completion_tokens'], 'token')} so far",
        after="Its stream ends with an error; the tokens generated until then are charged",
        affects=f"The caller from {found['tenant']} that is waiting for this answer, within seconds.",
        undo="Not possible: the caller must send the request again.",
        verb="Cancel the request",
        path=f"/requests/{request_id}/cancel",
        back="/requests",
        back_label="Live requests",
        facts=[("Request", request_id), ("Key", found["api_key_id"]), ("Running for", duration(found["age_s"]))],
    ).ask(visit)


async def cancel(visit: Visit) -> Response:
    await visit.rest.post(f"/requests/{visit.param('request_id')}/cancel")
    return visit.done("The request is being cancelled; the tokens generated so far are charged.", "/requests")


async def facts(visit: Visit) -> dict[str, Any]:
    tenant, after = visit.query("tenant"), visit.query("after")
    listed = await panel(visit.rest.get("/requests", tenant=tenant, limit=PAGE, after=after))
    return {"tenant": tenant, "after": after, "requests": listed}
