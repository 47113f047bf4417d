"""Bases: the base models registered in the database, their servers, and the versions that were validated for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.responses import Response

from loramux.admin.console.confirmation import Confirmation, counted
from loramux.admin.console.formats import short
from loramux.admin.console.forms import Form
from loramux.admin.console.rest_calls import Document
from loramux.admin.console.visit import Visit
from loramux.platform.errors import InvalidRequest

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


async def weigh(visit: Visit) -> Response:
    """Show the form for the bases' weights or, after the choice, what the weights will change."""
    bases = (await visit.rest.get("/bases"))["data"]
    asked = Form(visit.request.query_params.multi_items())
    problem = None
    if asked.all("base"):
        try:
            return await _ask(visit, bases, _weights(asked))
        except InvalidRequest as error:
            problem = error.message
    return visit.page("weights.html", bases=bases, problem=problem)


async def set_weights(visit: Visit) -> Response:
    body = {"weights": [{"base": base, "weight": weight} for base, weight in _weights(visit.form).items()]}
    bases = (await visit.rest.call("PUT", "/bases/weights", body))[0]["data"]
    return visit.done(f"Requests are now served by {_shares(bases, _current(bases))}.", "/bases")


async def confirm_revalidate(visit: Visit) -> Response:
    base = await visit.rest.get(f"/bases/{visit.param('base_id')}")
    number = counted(base["num_rejected"], "ready version")
    return Confirmation(
        title=f"Validate the rejected versions of {_name(base)} again",
        before=f"{number} rejected for this base",
        after=f"{number} pending, until a server of the base has validated them",
        affects="Nobody: servers of this base refuse these versions until they are valid."
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
        after="The base and its validation results are deleted",
        affects="Nobody: this is refused while a server serves the base. Results for other bases do not change.",
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


async def _ask(visit: Visit, bases: Sequence[Document], weights: Mapping[str, int]) -> Response:
    chosen = [base for base in bases if base["id"] in weights]
    before, after = _shares(bases, _current(bases)), _shares(bases, weights)
    return Confirmation(
        title="Divide requests between bases" if weights else "Stop dividing requests between bases",
        before=f"Served by {before}",
        after=f"Served by {after}",
        affects="New requests to all servers of these bases, within a few seconds. Running requests finish on their "
        "base. Each tenant's requests for an adapter go to one base.",
        undo="Change the weights again.",
        verb="Set weights" if weights else "Remove weights",
        path="/bases/weights",
        back="/bases",
        back_label="Bases",
        fields={
            "base": [base["id"] for base in bases],
            **{f"weight_{base_id}": str(weight) for base_id, weight in weights.items()},
        },
        facts=[(f"Servers of {_name(base)}", ", ".join(_running(base)) or "none") for base in chosen],
        is_danger=False,
    ).ask(visit)


def _weights(form: Form) -> dict[str, int]:
    found = {base_id: form.optional_integer(f"weight_{base_id}", "a weight") for base_id in form.all("base")}
    weights = {base_id: weight for base_id, weight in found.items() if weight is not None}
    if len(weights) == 1:
        raise InvalidRequest("enter weights for at least two bases, or for none")
    if weights and not any(weights.values()):
        raise InvalidRequest("enter a weight above 0 for at least one base")
    return weights


def _current(bases: Sequence[Document]) -> dict[str, int]:
    return {base["id"]: base["weight"] for base in bases if base["weight"] is not None}


def _shares(bases: Sequence[Document], weights: Mapping[str, int]) -> str:
    """Return the bases' shares as text: `llama 3f9c... (90 %) and llama 1b07... (10 %)`."""
    total = sum(weights.values())
    if not total:
        return "the base of the server that receives them"
    shares = (
        f"{base['served_name']} {short(base['id'])} ({100 * weights[base['id']] / total:.3g} %)"
        for base in bases
        if base["id"] in weights
    )
    return " and ".join(shares)


def _name(base: Document) -> str:
    return f"{base['served_name']} ({short(base['id'])})"


def _running(base: Document) -> list[str]:
    return [one["address"] for one in base["servers"] if one["state"] != "silent"]


def _facts(base: Document) -> list[tuple[str, str]]:
    return [("Identifier", base["id"]), ("Running servers", ", ".join(_running(base)) or "none")]
