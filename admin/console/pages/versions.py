"""One version of an adapter: its validation report, its possible changes, and the upload of a new version."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from loramux.admin.console.confirmation import Confirmation
from loramux.admin.console.visit import Forwarded, Visit
from loramux.platform.errors import InvalidRequest

MOVES = {
    "archive": "is out of service",
    "restore": "is back in service",
    "quarantine": "is out of service, even if aliases point at it",
    "preload": "is in the page pool or being loaded into it",
    "pin": "is pinned in the page pool",
    "unpin": "can be evicted from the page pool",
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


async def confirm_move(visit: Visit) -> Response:
    adapter_id, number, verb = visit.param("adapter_id"), visit.param("number"), visit.param("verb")
    adapter = await visit.rest.get(f"/adapters/{adapter_id}")
    version = await visit.rest.get(f"/adapters/{adapter_id}/versions/{number}")
    named = [name for name, targets in adapter["aliases"].items() if int(number) in {one["version"] for one in targets}]
    called = f"{adapter['model']}@{number}"
    texts = {
        "archive": ("Archive", "is out of service", "Put it back into service on the version's page."),
        "quarantine": (
            "Quarantine",
            "is out of service immediately, even if aliases point at it",
            "A platform administrator can put it back into service on the version's page.",
        ),
        "restore": ("Put back", "serves requests again", "Archive or quarantine it again."),
    }
    if verb not in texts:
        raise InvalidRequest("there is no such action for a version")
    title, after, undo = texts[verb]
    affects = f"Callers of {called}; running requests finish."
    if named and verb == "quarantine":
        affects = f"Callers of {called} or {', '.join(named)}; these aliases keep their other versions, if any."
    elif named and verb == "archive":
        affects = f"Nobody yet: {', '.join(named)} still points here and must be moved first."
    return Confirmation(
        title=f"{title} version {number}",
        before=f"{called} is {version['state']}",
        after=f"{called} {after}",
        affects=affects,
        undo=undo,
        verb=f"{title} version {number}",
        path=f"/adapters/{adapter_id}/versions/{number}/{verb}",
        back=f"/adapters/{adapter_id}/versions/{number}",
        back_label=called,
        facts=[("Aliases that point here", ", ".join(named) or "none")],
        is_danger=verb != "restore",
    ).ask(visit)


async def move(visit: Visit) -> Response:
    adapter_id, number, verb = visit.param("adapter_id"), visit.param("number"), visit.param("verb")
    if verb not in MOVES:
        raise InvalidRequest("there is no such action for a version")
    here = f"/adapters/{adapter_id}/versions/{number}"
    await visit.rest.post(f"{here}/{verb}")
    is_withdrawn = verb in ("archive", "quarantine")
    return visit.done(f"Version {number} {MOVES[verb]}.", here, visit.url(f"{here}/restore") if is_withdrawn else "")


async def declare_upload(visit: Visit) -> Response:
    """Forward the browser's declaration of files to the REST route, and the route's response to the browser."""
    return Forwarded(visit, "POST", f"/adapters/{visit.param('adapter_id')}/uploads")


async def cancel_upload(visit: Visit) -> Response:
    return Forwarded(visit, "DELETE", f"/adapters/{visit.param('adapter_id')}/uploads/{visit.param('upload_id')}")


async def put_file(visit: Visit) -> Response:
    path = f"/adapters/{visit.param('adapter_id')}/uploads/{visit.param('upload_id')}/files/{visit.param('name')}"
    return Forwarded(visit, "PUT", path)


async def create(visit: Visit) -> Response:
    return Forwarded(visit, "POST", f"/adapters/{visit.param('adapter_id')}/versions")
