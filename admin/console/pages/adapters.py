"""Adapters: the list, an adapter's page, its grants, and taking it out of service."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.responses import Response

from loramux.admin.console.confirmation import Confirmation
from loramux.admin.console.pages.adapter_use import requests_of_adapter, speed_by_version, use_by_version
from loramux.admin.console.panels import panel
from loramux.admin.console.rest_calls import Document, RestCalls
from loramux.admin.console.visit import Visit
from loramux.platform.errors import InvalidRequest

USE_FRESH_S = 5.0
MAX_SUMMED = 10
"""Maximum number of grantees whose usage is included in an adapter's totals."""
PAGE = 50


async def show_list(visit: Visit) -> Response:
    """List all visible adapters, one tenant's adapters, or the adapter with a given name."""
    tenant, name = visit.query("tenant"), visit.query("name")
    # Names are unique only within a tenant.
    needs_tenant = name is not None and visit.is_platform and tenant is None
    page: Document = {"data": [], "has_more": False}
    if not needs_tenant:
        page = await visit.rest.get("/adapters", tenant=tenant, name=name, limit=PAGE, after=visit.query("after"))
    return visit.page("adapters.html", adapters=page, tenant=tenant, name=name, needs_tenant=needs_tenant)


async def create(visit: Visit) -> Response:
    form = visit.form
    tenant = form.text("tenant") or visit.session.principal.tenant_slug or ""
    made = await visit.post_once("/adapters", {"tenant": tenant, "name": form.text("name")})
    return visit.done(f"Created {made['model']}. Upload its first version.", f"/adapters/{made['id']}")


async def show(visit: Visit) -> Response:
    """One adapter: its aliases, the usage of its versions, and its grants."""
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
    scores, use, speed = await asyncio.gather(
        _scores(rest, adapter_id, [version["number"] for version in versions["data"]]),
        visit.site.recent.get(
            ("use", adapter_id, visit.sees), USE_FRESH_S, lambda: panel(use_by_version(rest, adapter, others))
        ),
        visit.site.recent.get(
            ("speed", adapter_id, visit.sees), USE_FRESH_S, lambda: panel(speed_by_version(rest, adapter))
        ),
    )
    return visit.page(
        "adapter.html",
        adapter=adapter,
        aliases=aliases["data"],
        versions=versions,
        grants=grants,
        scores=scores,
        use=use,
        speed=speed,
        api_url=visit.site.services.api_url,
    )


async def _scores(rest: RestCalls, adapter_id: str, numbers: Sequence[int]) -> dict[int, Document]:
    """Return the newest finished eval of each version that has one."""
    if not numbers:
        return {}
    page = await rest.get(f"/adapters/{adapter_id}/evals", newest_of=numbers)
    return {one["version"]: one for one in page["data"]}


async def confirm_state(visit: Visit) -> Response:
    adapter_id = visit.param("adapter_id")
    adapter = await visit.rest.get(f"/adapters/{adapter_id}")
    grants, used = await asyncio.gather(
        visit.rest.get(f"/adapters/{adapter_id}/grants", limit=100), requests_of_adapter(visit.rest, adapter)
    )
    is_active, model = adapter["state"] == "active", adapter["model"]
    serves, refuses = f"{model} serves requests under all its names", f"{model} serves no new requests under any name"
    others = [grant["tenant"] for grant in grants["data"]]
    return Confirmation(
        title=f"Take {model} out of service" if is_active else f"Put {model} back into service",
        before=serves if is_active else refuses,
        after=refuses if is_active else serves,
        affects=f"Callers from {adapter['tenant']}"
        + (f" and from {', '.join(others[:5])}{' and others' if len(others) > 5 else ''}" if others else "")
        + ", from the next request on. Running requests finish.",
        undo="One click on the adapter's page. Versions, aliases and grants stay as they are.",
        verb="Take out of service" if is_active else "Put back into service",
        path=f"/adapters/{adapter_id}/state",
        back=f"/adapters/{adapter_id}",
        back_label=model,
        fields={"state": "disabled" if is_active else "active"},
        facts=[("Requests", used)],
        is_danger=is_active,
    ).ask(visit)


async def set_disabled(visit: Visit) -> Response:
    verb = "disable" if visit.form.text("state") == "disabled" else "enable"
    await visit.rest.post(f"/adapters/{visit.param('adapter_id')}/{verb}")
    done = "serves no new requests" if verb == "disable" else "serves requests again"
    undo = visit.url(f"/adapters/{visit.param('adapter_id')}/state")
    return visit.done(f"The adapter {done}.", f"/adapters/{visit.param('adapter_id')}", undo)


async def confirm_delete(visit: Visit) -> Response:
    adapter = await visit.rest.get(f"/adapters/{visit.param('adapter_id')}")
    return Confirmation(
        title=f"Delete {adapter['model']}",
        before=f"{adapter['model']} has no version yet",
        after="The name is free again",
        affects="Nobody: an adapter that ever had a version can only be taken out of service.",
        undo="Create it again; it gets a new identifier.",
        verb="Delete",
        path=f"/adapters/{adapter['id']}/delete",
        back=f"/adapters/{adapter['id']}",
        back_label=adapter["model"],
    ).ask(visit)


async def delete(visit: Visit) -> Response:
    adapter = await visit.rest.get(f"/adapters/{visit.param('adapter_id')}")
    await visit.rest.delete(f"/adapters/{adapter['id']}")
    return visit.done(f"{adapter['model']} is deleted.", "/adapters")


async def add_grant(visit: Visit) -> Response:
    tenant = visit.form.text("tenant")
    if not tenant:
        raise InvalidRequest("enter the tenant that may call the adapter", param="tenant")
    await visit.rest.call("PUT", f"/adapters/{visit.param('adapter_id')}/grants/{tenant}")
    return visit.done(f"{tenant} may call this adapter and pays for its calls.")


async def confirm_remove_grant(visit: Visit) -> Response:
    adapter = await visit.rest.get(f"/adapters/{visit.param('adapter_id')}")
    tenant = visit.query("tenant") or ""
    return Confirmation(
        title=f"Revoke the grant to {tenant}",
        before=f"{tenant} may call {adapter['model']}",
        after=f"{adapter['model']} returns 404 for {tenant}",
        affects=f"Callers from {tenant}, from the next request on. Running requests finish.",
        undo="Grant it again on the adapter's page.",
        verb="Revoke",
        path=f"/adapters/{adapter['id']}/grants/remove",
        back=f"/adapters/{adapter['id']}",
        back_label=adapter["model"],
        fields={"tenant": tenant},
    ).ask(visit)


async def remove_grant(visit: Visit) -> Response:
    adapter_id, tenant = visit.param("adapter_id"), visit.form.text("tenant")
    await visit.rest.delete(f"/adapters/{adapter_id}/grants/{tenant}")
    return visit.done(f"{tenant} may no longer call this adapter.", f"/adapters/{adapter_id}")
