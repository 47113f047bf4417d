"""One version of an adapter: what validation found, what it can be made to do; and uploading another one."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from loramux.admin.console.rest_calls import RestCalls
from loramux.admin.console.visit import Visit
from loramux.platform.errors import InvalidRequest

MOVES = {
    "archive": "is out of service",
    "restore": "is back in service",
    "quarantine": "is out of service, whatever names it",
    "preload": "is in the page pool, or on its way there",
    "pin": "is pinned to the page pool",
    "unpin": "may give way to others in the page pool",
}


async def show(visit: Visit) -> Response:
    adapter_id, number = visit.param("adapter_id"), visit.param("number")
    adapter, version, report = await asyncio.gather(
        visit.rest.get(f"/adapters/{adapter_id}"),
        visit.rest.get(f"/adapters/{adapter_id}/versions/{number}"),
        visit.rest.get(f"/adapters/{adapter_id}/versions/{number}/report"),
    )
    template = "version_state.html" if visit.is_partial else "version.html"
    return visit.page(template, adapter=adapter, version=version, report=report, api_url=visit.site.services.api_url)


async def move(visit: Visit) -> Response:
    """Change the version's state or place."""
    adapter_id, number, verb = visit.param("adapter_id"), visit.param("number"), visit.param("verb")
    if verb not in MOVES:
        raise InvalidRequest("versions have no such change")
    await visit.rest.post(f"/adapters/{adapter_id}/versions/{number}/{verb}")
    return visit.done(f"Version {number} {MOVES[verb]}.")


async def declare_upload(visit: Visit) -> Response:
    """Pass on what the browser declares of two files; the answer is the route's own."""
    return Forwarded(visit, "POST", f"/adapters/{visit.param('adapter_id')}/uploads")


async def put_file(visit: Visit) -> Response:
    path = f"/adapters/{visit.param('adapter_id')}/uploads/{visit.param('upload_id')}/files/{visit.param('name')}"
    return Forwarded(visit, "PUT", path)


async def create(visit: Visit) -> Response:
    return Forwarded(visit, "POST", f"/adapters/{visit.param('adapter_id')}/versions")


class Forwarded(Response):
    """Lets a route of the REST read the browser's body and answer it, as it comes."""

    def __init__(self, visit: Visit, method: str, path: str) -> None:
        super().__init__()
        self._rest: RestCalls = visit.rest
        self._request: Request = visit.request
        self._method = method
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name in (b"content-type", b"content-length")]
        params = dict(self._request.query_params)
        await self._rest.forward(self._method, self._path, headers, self._request.receive, send, params)
