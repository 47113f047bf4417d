"""Bases: the base models on the database, their servers, and the versions that were validated for each."""

from __future__ import annotations

from starlette.responses import Response

from loramux.admin.console.confirmation import Confirmation, counted
from loramux.admin.console.formats import short
from loramux.admin.console.rest_calls import Document
from loramux.admin.console.visit import Visit

NUM_LISTED = 50


async def show(visit: Visit) -> Response:
    """Show all bases, and the rejected versions of the chosen base, which is the server's own base by default."""
    bases = (await visit.rest.get("/bases"))["data"]
    wanted = visit.query("base")
    if wanted is not None:
        shown: Document | None = await visit.rest.get(f"/bases/{wanted}")
    else:
        shown = next((one for one in bases if one["is_own"]), None)
    rejected = None
    if shown is not None:
        path = f"/bases/{shown['id']}/rejected"
        rejected = await visit.rest.get(path, limit=NUM_LISTED, after=visit.query("after"))
    return visit.page("bases.html", bases=bases, shown=shown, rejected=rejected)


async def confirm_revalidate(visit: Visit) -> Response:
    base = await visit.rest.get(f"/bases/{visit.param('base_id')}")
    number = counted(base["num_rejected"], "ready version")
    return Confirmation(
        title=f"Validate the rejected versions of {_name(base)} again",
        before=f"{number} rejected for this base",
        after=f"{number} pending, until a server of the base has validated them",
        affects="Nobody: servers of this base refuse these versions now, and until they are valid."
        + ("" if _running(base) else " No server serves this base at the moment, so the versions stay pending."),
        undo="Not needed: versions that are still not valid are rejected again, with the current reasons.",
        verb="Validate again",
        path=f"/bases/{base['id']}/revalidate",
        back="/bases",
        back_label="Bases",
        facts=_facts(base),
        is_danger=False,
    ).ask(visit)


async def revalidate(visit: Visit) -> Response:
    base = await visit.rest.post(f"/bases/{visit.param('base_id')}/revalidate")
    number = base["num_revalidated"]
    waits = f"{counted(number, 'version')} {'waits' if number == 1 else 'wait'} for validation."
    return visit.done(waits, "/bases")


async def confirm_forget(visit: Visit) -> Response:
    base = await visit.rest.get(f"/bases/{visit.param('base_id')}")
    return Confirmation(
        title=f"Forget {_name(base)}",
        before=f"{counted(base['num_validated'] + base['num_rejected'], 'ready version')} checked for this base",
        after="The base and the verdicts on versions for it are deleted",
        affects="Nobody: this is refused while a server serves the base. Verdicts for other bases do not change.",
        undo="Start a server of the base: it validates all versions again.",
        verb="Forget",
        path=f"/bases/{base['id']}/forget",
        back="/bases",
        back_label="Bases",
        facts=_facts(base),
    ).ask(visit)


async def forget(visit: Visit) -> Response:
    base_id = visit.param("base_id")
    await visit.rest.delete(f"/bases/{base_id}")
    return visit.done(f"The base {short(base_id)} is forgotten.", "/bases")


def _name(base: Document) -> str:
    return f"{base['served_name']} ({short(base['id'])})"


def _running(base: Document) -> list[str]:
    return [one["address"] for one in base["servers"] if one["state"] != "silent"]


def _facts(base: Document) -> list[tuple[str, str]]:
    return [("Identifier", base["id"]), ("Running servers", ", ".join(_running(base)) or "none")]
