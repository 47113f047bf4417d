"""Adapters: the list, one of them, its aliases and how they move, its grants."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from loramux.admin.console.latency import latency_of
from loramux.admin.console.panels import panel
from loramux.admin.console.rest_calls import Document, RestCalls, RestError
from loramux.admin.console.visit import Visit
from loramux.platform.errors import InvalidRequest

DAY_S = 86_400
USE_FRESH_S = 5.0
MAX_SUMMED = 10
"""Of the tenants that an adapter is granted to, whose use is summed up."""
PAGE = 50


async def show_list(visit: Visit) -> Response:
    """All adapters that may be seen, or those of a tenant, or the one of a name."""
    tenant, name = visit.query("tenant"), visit.query("name")
    page = await visit.rest.get("/adapters", tenant=tenant, name=name, limit=PAGE, after=visit.query("after"))
    return visit.page("adapters.html", adapters=page, tenant=tenant, name=name)


async def create(visit: Visit) -> Response:
    form = visit.form
    tenant = form.text("tenant") or visit.session.principal.tenant_slug or ""
    made = await visit.rest.post("/adapters", {"tenant": tenant, "name": form.text("name")})
    return visit.done(f"Made {made['model']}. Upload its first version.", f"/adapters/{made['id']}")


async def show(visit: Visit) -> Response:
    """One adapter: where its names lead, how its versions do, who else may call it."""
    rest, adapter_id = visit.rest, visit.param("adapter_id")
    adapter = await rest.get(f"/adapters/{adapter_id}")
    aliases, versions, grants = await asyncio.gather(
        rest.get(f"/adapters/{adapter_id}/aliases"),
        rest.get(f"/adapters/{adapter_id}/versions", limit=PAGE, after=visit.query("after")),
        panel(rest.get(f"/adapters/{adapter_id}/grants")),
    )
    others = (
        [grant["tenant"] for grant in grants.data["data"]][:MAX_SUMMED] if grants.data and visit.is_platform else []
    )
    use, speed = await asyncio.gather(
        visit.site.recent.get(("use", adapter_id, visit.sees), USE_FRESH_S, lambda: panel(_use(rest, adapter, others))),
        visit.site.recent.get(("speed", adapter_id, visit.sees), USE_FRESH_S, lambda: panel(_speed(rest, adapter))),
    )
    return visit.page(
        "adapter.html",
        adapter=adapter,
        aliases=aliases["data"],
        versions=versions,
        grants=grants,
        use=use,
        speed=speed,
        api_url=visit.site.services.api_url,
    )


async def set_alias(visit: Visit) -> Response:
    """Point an alias at versions by weight, unless somebody moved it since the form was shown."""
    adapter_id = visit.param("adapter_id")
    form = visit.form
    name = form.text("alias")
    targets = []
    for number in form.all("version"):
        weight = form.optional_integer(f"weight_{number}", "a weight")
        if weight:
            targets.append({"version": _integer(number), "weight": weight})
    if not targets:
        raise InvalidRequest("give at least one version a weight above 0")
    revision = form.text("revision")
    try:
        alias, _ = await visit.rest.call(
            "PUT",
            f"/adapters/{adapter_id}/aliases/{name}",
            {"targets": targets},
            etag=f'"{revision}"' if revision else None,
        )
    except RestError as error:
        if error.status != 412:
            raise
        raise InvalidRequest(
            f"somebody has moved {name} since you opened this page, and nothing was changed: "
            "look at where it leads now, and move it again if you still want to"
        ) from None
    return visit.done(f"{name} now leads to {described(alias['targets'])}.", f"/adapters/{adapter_id}")


async def confirm_rollback(visit: Visit) -> Response:
    """What a rollback would move, before it does."""
    adapter_id, name = visit.param("adapter_id"), visit.param("name")
    adapter, alias, history = await asyncio.gather(
        visit.rest.get(f"/adapters/{adapter_id}"),
        visit.rest.get(f"/adapters/{adapter_id}/aliases/{name}"),
        visit.rest.get(f"/adapters/{adapter_id}/aliases/{name}/history", limit=20),
    )
    wanted = visit.query("revision")
    others = [change for change in history["data"] if change["revision"] != alias["revision"]]
    chosen = next((change for change in others if wanted is None or str(change["revision"]) == wanted), None)
    return visit.page("rollback.html", adapter=adapter, alias=alias, history=history["data"], chosen=chosen)


async def roll_back(visit: Visit) -> Response:
    adapter_id, name = visit.param("adapter_id"), visit.param("name")
    current = await visit.rest.get(f"/adapters/{adapter_id}/aliases/{name}")
    if str(current["revision"]) != visit.form.text("seen"):
        raise InvalidRequest(
            f"somebody has moved {name} since you opened this page, and nothing was changed: look again"
        )
    revision = visit.form.integer("revision", "the revision")
    alias = await visit.rest.post(f"/adapters/{adapter_id}/aliases/{name}/rollback", {"revision": revision})
    return visit.done(f"{name} leads to {described(alias['targets'])} again.", f"/adapters/{adapter_id}")


async def delete_alias(visit: Visit) -> Response:
    name = visit.param("name")
    await visit.rest.delete(f"/adapters/{visit.param('adapter_id')}/aliases/{name}")
    return visit.done(f"The alias {name} is gone.")


async def set_disabled(visit: Visit) -> Response:
    """Take the adapter out of service, or back into it."""
    verb = "disable" if visit.form.text("state") == "disabled" else "enable"
    await visit.rest.post(f"/adapters/{visit.param('adapter_id')}/{verb}")
    done = "answers no new request" if verb == "disable" else "answers requests again"
    return visit.done(f"The adapter {done}.")


async def add_grant(visit: Visit) -> Response:
    tenant = visit.form.text("tenant")
    if not tenant:
        raise InvalidRequest("say which tenant may call it", param="tenant")
    await visit.rest.call("PUT", f"/adapters/{visit.param('adapter_id')}/grants/{tenant}")
    return visit.done(f"{tenant} may call this adapter, and pays for its calls.")


async def remove_grant(visit: Visit) -> Response:
    tenant = visit.form.text("tenant")
    await visit.rest.delete(f"/adapters/{visit.param('adapter_id')}/grants/{tenant}")
    return visit.done(f"{tenant} may not call this adapter any more.")


def described(targets: Sequence[Mapping[str, Any]]) -> str:
    """`version 3`, or `version 2 (90 %) and version 3 (10 %)`."""
    total = sum(target["weight"] for target in targets)
    if len(targets) == 1:
        return f"version {targets[0]['version']}"
    return " and ".join(f"version {target['version']} ({100 * target['weight'] / total:.3g} %)" for target in targets)


async def _use(rest: RestCalls, adapter: Document, others: Sequence[str]) -> dict[str, dict[str, int]]:
    """Requests, failures and tokens of the last day by version id, of the owner and of `others` with a grant."""
    now = int(time.time())
    pages = await asyncio.gather(
        *(
            rest.get("/usage", start=now - DAY_S, end=now + 1, group_by="version,status", tenant=tenant)
            for tenant in (adapter["tenant"], *others)
        )
    )
    found: dict[str, dict[str, int]] = {}
    for row in (row for page in pages for bucket in page["data"] for row in bucket["results"]):
        sums = found.setdefault(row["version"] or "", {"requests": 0, "failed": 0, "tokens": 0})
        sums["requests"] += row["requests"]
        sums["tokens"] += row["prompt_tokens"] + row["completion_tokens"]
        if row["status"] == "failed":
            sums["failed"] += row["requests"]
    return found


async def _speed(rest: RestCalls, adapter: Document) -> dict[str, Any]:
    """How fast the versions answered, from the tenant's latest requests."""
    events = (await rest.get("/usage/events", tenant=adapter["tenant"], limit=100))["data"]
    by_version: dict[str, list[Document]] = {}
    for event in events:
        by_version.setdefault(event["adapter_version_id"] or "", []).append(event)
    return {version: latency_of(of_version) for version, of_version in by_version.items()}


def _integer(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise InvalidRequest("a version is a whole number", param="version")
    return int(text)
