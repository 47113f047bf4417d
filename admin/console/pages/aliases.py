"""Aliases: choosing their targets and weights, rolling them back, and deleting them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from starlette.responses import Response

from loramux.admin.console.confirmation import Confirmation, counted
from loramux.admin.console.forms import Form
from loramux.admin.console.pages.adapter_use import requests_of_adapter
from loramux.admin.console.rest_calls import Document, RestError
from loramux.admin.console.visit import Visit
from loramux.platform.errors import InvalidRequest

MAX_CHOSEN = 100
"""Number of versions, newest first, that the alias form considers besides the alias's targets. It offers the ready ones
as targets.
"""
CANARY_FIELDS = ("max_error_percent", "max_first_token_s", "min_requests")


async def move(visit: Visit) -> Response:
    """Show the form that chooses versions for an alias or, after the choice, what the choice will change."""
    adapter_id, asked = visit.param("adapter_id"), Form(visit.request.query_params.multi_items())
    name = asked.text("alias")
    adapter, versions, aliases = await asyncio.gather(
        visit.rest.get(f"/adapters/{adapter_id}"),
        visit.rest.get(f"/adapters/{adapter_id}/versions", limit=MAX_CHOSEN),
        visit.rest.get(f"/adapters/{adapter_id}/aliases"),
    )
    alias = next((one for one in aliases["data"] if one["name"] == name), None)
    weights = {} if alias is None else {target["version"]: target["weight"] for target in alias["targets"]}
    problem, bounds = None, _canary_fields(_running_canary(alias))
    if asked.all("version"):
        bounds = {name: asked.text(name) for name in CANARY_FIELDS}
        try:
            return await _ask(visit, adapter, alias, name, _targets(asked), _canary(asked), _options(asked))
        except InvalidRequest as error:
            problem = error.message
    listed = versions["data"]
    missing = weights.keys() - {version["number"] for version in listed}
    listed += await asyncio.gather(
        *(visit.rest.get(f"/adapters/{adapter_id}/versions/{number}") for number in sorted(missing, reverse=True))
    )
    return visit.page(
        "move.html",
        adapter=adapter,
        alias=alias,
        name=name,
        ready=[version for version in listed if version["state"] == "ready"],
        weights=weights,
        bounds=bounds,
        problem=problem,
    )


async def set_alias(visit: Visit) -> Response:
    """Point an alias at versions by weight, unless someone has moved it since the form was shown."""
    adapter_id, name, revision = visit.param("adapter_id"), visit.form.text("alias"), visit.form.text("revision")
    path = f"/adapters/{adapter_id}/aliases/{name}"
    body: dict[str, Any] = {"targets": _targets(visit.form)}
    canary = _canary(visit.form)
    if canary:
        body["canary"] = canary
    body |= _options(visit.form)
    alias = await _change(visit, "PUT", path, body, name, revision)
    undo = visit.url(f"{path}/rollback") if revision else visit.url(f"{path}/delete")
    if visit.form.text("is_unmoved"):
        undo = ""
    return visit.done(f"{name} now points to {described(alias['targets'])}.", f"/adapters/{adapter_id}", undo)


async def confirm_rollback(visit: Visit) -> Response:
    adapter_id, name = visit.param("adapter_id"), visit.param("name")
    adapter, alias, history = await asyncio.gather(
        visit.rest.get(f"/adapters/{adapter_id}"),
        visit.rest.get(f"/adapters/{adapter_id}/aliases/{name}"),
        visit.rest.get(f"/adapters/{adapter_id}/aliases/{name}/history", limit=20),
    )
    wanted = visit.query("revision")
    others = [change for change in history["data"] if change["revision"] != alias["revision"]]
    if wanted is None:
        chosen = next((change for change in others if _restored(change) != _restored(alias)), None)
    else:
        chosen = next((change for change in others if str(change["revision"]) == wanted), None)
    return visit.page("rollback.html", adapter=adapter, alias=alias, history=history["data"], chosen=chosen)


async def roll_back(visit: Visit) -> Response:
    adapter_id, name = visit.param("adapter_id"), visit.param("name")
    path = f"/adapters/{adapter_id}/aliases/{name}"
    body = {"revision": visit.form.integer("revision", "the revision")}
    alias = await _change(visit, "POST", f"{path}/rollback", body, name, _seen(visit))
    said = f"{name} points to {described(alias['targets'])} again."
    return visit.done(said, f"/adapters/{adapter_id}", visit.url(f"{path}/rollback"))


async def confirm_delete(visit: Visit) -> Response:
    adapter_id, name = visit.param("adapter_id"), visit.param("name")
    adapter, alias = await asyncio.gather(
        visit.rest.get(f"/adapters/{adapter_id}"), visit.rest.get(f"/adapters/{adapter_id}/aliases/{name}")
    )
    called = f"{adapter['model']}:{name}"
    return Confirmation(
        title=f"Delete {name}",
        before=f"{called} points to {described(alias['targets'])}",
        after=f"{called} returns 404",
        affects=f"Callers of {called}, from the next request on; running requests finish.",
        undo="Create the alias again. Its history is lost; the versions stay and can be called by number.",
        verb="Delete",
        path=f"/adapters/{adapter_id}/aliases/{name}/delete",
        back=f"/adapters/{adapter_id}",
        back_label=adapter["model"],
        fields={"seen": str(alias["revision"])},
    ).ask(visit)


async def delete(visit: Visit) -> Response:
    adapter_id, name = visit.param("adapter_id"), visit.param("name")
    path = f"/adapters/{adapter_id}/aliases/{name}"
    alias = await visit.rest.get(path)
    await _change(visit, "DELETE", path, None, name, _seen(visit))
    again = visit.url(f"/adapters/{adapter_id}/move", **_asked_again(alias))
    return visit.done(f"The alias {name} is deleted.", f"/adapters/{adapter_id}", again)


def described(targets: Sequence[Mapping[str, Any]]) -> str:
    """Return the targets as text: `version 3`, or `version 2 (90 %) and version 3 (10 %)`."""
    if not targets:
        return "nothing"
    total = sum(target["weight"] for target in targets)
    if len(targets) == 1:
        return f"version {targets[0]['version']}"
    return " and ".join(f"version {target['version']} ({100 * target['weight'] / total:.3g} %)" for target in targets)


async def _change(
    visit: Visit, method: str, path: str, body: Mapping[str, Any] | None, name: str, seen_revision: str
) -> Document:
    """Change an alias, unless someone else has changed it since `seen_revision`. An empty string skips the check."""
    try:
        etag = f'"{seen_revision}"' if seen_revision else None
        return (await visit.rest.call(method, path, body, etag=etag))[0]
    except RestError as error:
        if error.status != 412:
            raise
        raise InvalidRequest(
            f"someone has moved {name} since you opened this page, and nothing was changed: "
            "check where it points now, and repeat the change if you still want it"
        ) from None


def _seen(visit: Visit) -> str:
    return str(visit.form.integer("seen", "the revision that you saw"))


async def _ask(
    visit: Visit,
    adapter: Document,
    alias: Document | None,
    name: str,
    targets: Sequence[Mapping[str, int]],
    canary: Mapping[str, float],
    options: Mapping[str, str | int | None],
) -> Response:
    if not name:
        raise InvalidRequest("enter a name for the alias")
    present = {} if alias is None else alias
    changed = {option: value for option, value in options.items() if value != present.get(option)}
    watched = _running_canary(alias)
    is_same = alias is not None and _shares(alias["targets"]) == _shares(targets)
    are_prefilled = bool(watched) and _canary_fields(canary) == _canary_fields(watched)
    # Without a running canary, bounds need a version that gets more requests.
    if is_same and not changed and (not watched or are_prefilled):
        raise InvalidRequest(f"{name} already points there")
    if alias is not None and are_prefilled and not _keeps_canary(alias, targets):
        # The form's bounds were meant for the versions that the canary watches, not for those that now get more.
        canary = {}
    path, called = f"/adapters/{adapter['id']}", adapter["model"] + ("" if name == "default" else f":{name}")
    grants, used = await asyncio.gather(
        visit.rest.get(f"{path}/grants", limit=100), requests_of_adapter(visit.rest, adapter)
    )
    others = counted(len(grants["data"]), "tenant") + (" and more" if grants["has_more"] else "")
    fields = {f"weight_{target['version']}": str(target["weight"]) for target in targets}
    undo = "Roll back, with one click on the adapter's page or in the notice after the change."
    is_unmoved = is_same and "share_base_cache" not in changed
    if is_unmoved:
        undo = "Move it again with the earlier values. A rollback restores only versions and sharing."
    elif "share_base_cache" in changed:
        undo += " The sharing is restored, too."
    return Confirmation(
        title=f"Move {name}" if alias else f"Create {name}",
        before=described(alias["targets"]) if alias else f"{called} returns 404",
        after=described(targets),
        affects=f"New requests for {called} from {adapter['tenant']}"
        + (f" and from {others} with a grant" if grants["data"] else "")
        + ", once the versions are loaded. Running requests finish on their version.",
        undo=undo if alias else "Delete it again.",
        verb=f"Move {name}" if alias else f"Create {name}",
        path=f"{path}/aliases",
        back=path,
        back_label=adapter["model"],
        fields={
            "alias": name,
            "revision": str(alias["revision"]) if alias else "",
            "is_unmoved": "yes" if is_unmoved else "",
            "version": [str(target["version"]) for target in targets],
            **fields,
            **_canary_fields(canary),
            **{option: "" if value is None else str(value) for option, value in options.items()},
        },
        facts=[
            ("Requests for the adapter", used),
            *_canary_facts(canary, is_watched=bool(watched)),
            *_option_facts(changed),
        ],
        is_danger=False,
    ).ask(visit)


def _targets(form: Form) -> list[dict[str, int]]:
    targets = []
    for number in form.all("version"):
        weight = form.optional_integer(f"weight_{number}", "a weight")
        if weight:
            targets.append({"version": _integer(number), "weight": weight})
    if not targets:
        raise InvalidRequest("enter a weight above 0 for at least one version")
    return sorted(targets, key=lambda target: target["version"])


def _canary(form: Form) -> dict[str, float]:
    """Return the bounds at which the alias rolls back on its own, or nothing. Raises InvalidRequest."""
    percent, first_token_s = _decimal(form, "max_error_percent"), _decimal(form, "max_first_token_s")
    bounds = {} if percent is None else {"max_error_rate": percent / 100}
    if first_token_s is not None:
        bounds["max_first_token_s"] = first_token_s
    min_requests = form.optional_integer("min_requests", "the number of requests")
    return {**bounds, "min_requests": min_requests} if bounds and min_requests else bounds


def _running_canary(alias: Document | None) -> dict[str, float]:
    """Return the bounds of the alias's canary, or nothing if there is none or it has rolled back."""
    canary = None if alias is None else alias["canary"]
    if canary is None or canary["verdict"] is not None:
        return {}
    names = ("max_error_rate", "max_first_token_s", "min_requests")
    return {name: canary[name] for name in names if canary[name] is not None}


def _keeps_canary(alias: Document, targets: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a version that the alias's canary watches gets at least the share that it has."""
    before, after = _shares(alias["targets"]), _shares(targets)
    return any(number in after and after[number] >= before.get(number, 0) for number in alias["canary"]["versions"])


def _options(form: Form) -> dict[str, str | int | None]:
    """Return the overflow and `share_base_cache` as fields of the call, as far as the form has them."""
    options: dict[str, str | int | None] = {}
    if form.all("overflow"):
        options["overflow"] = form.optional("overflow")
    if form.all("share_base_cache"):
        options["share_base_cache"] = form.optional_integer("share_base_cache", "the number of tokens")
    return options


def _option_facts(changed: Mapping[str, str | int | None]) -> list[tuple[str, str]]:
    facts = []
    if "overflow" in changed:
        facts.append(("Overflows to", str(changed["overflow"] or "no other model")))
    if "share_base_cache" in changed:
        num_own = changed["share_base_cache"]
        shared = "whole prompts" if num_own is None else f"only the last {num_own} tokens of a prompt, approximately"
        facts.append(("The adapter computes", shared))
    return facts


def _canary_fields(canary: Mapping[str, float]) -> dict[str, str]:
    shown = {name: canary.get(name) for name in ("max_first_token_s", "min_requests")}
    if "max_error_rate" in canary:
        shown["max_error_percent"] = 100 * canary["max_error_rate"]
    return {name: f"{value:g}" for name, value in shown.items() if value is not None}


def _canary_facts(canary: Mapping[str, float], *, is_watched: bool) -> list[tuple[str, str]]:
    texts = []
    if "max_error_rate" in canary:
        texts.append(f"more than {100 * canary['max_error_rate']:g} % of a version's requests fail")
    if "max_first_token_s" in canary:
        texts.append(f"its 95th percentile to the first token exceeds {canary['max_first_token_s']:g} s")
    if texts:
        return [("Rolls back on its own if", " or ".join(texts))]
    return [("No longer watched", "it no longer rolls back on its own")] if is_watched else []


def _decimal(form: Form, name: str) -> float | None:
    text = form.text(name)
    if not text:
        return None
    if re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,6})?", text) is None:
        raise InvalidRequest("a bound must be a number such as 2.5", param=name)
    return float(text)


def _shares(targets: Sequence[Mapping[str, Any]]) -> dict[int, Fraction]:
    total = sum(target["weight"] for target in targets)
    return {target["version"]: Fraction(target["weight"], total) for target in targets}


def _restored(state: Document) -> tuple[dict[int, Fraction], int | None]:
    """What a rollback to this state of an alias restores."""
    return _shares(state["targets"]), state["share_base_cache"]


def _asked_again(alias: Document) -> dict[str, Any]:
    """Return query parameters that open the `move` form with the targets and options of this alias."""
    targets = alias["targets"]
    weights = {f"weight_{target['version']}": target["weight"] for target in targets}
    options = {option: alias[option] for option in ("overflow", "share_base_cache") if alias[option] is not None}
    return {"alias": alias["name"], "version": [target["version"] for target in targets], **weights, **options}


def _integer(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise InvalidRequest("a version must be a whole number", param="version")
    return int(text)
