"""Adapters: the list, one of them, whether it is in service, its grants."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from loramux.admin.console.confirmation import Confirmation
from loramux.admin.console.pages.adapter_use import requests_of_adapter, speed_by_version, use_by_version
from loramux.admin.console.panels import panel
from loramux.admin.console.visit import Visit
from loramux.platform.errors import InvalidRequest

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
        use=use,
        speed=speed,
        api_url=visit.site.services.api_url,
    )


async def confirm_state(visit: Visit) -> Response:
    """What taking the adapter out of service, or back into it, means."""
    adapter_id = visit.param("adapter_id")
    adapter = await visit.rest.get(f"/adapters/{adapter_id}")
    grants, used = await asyncio.gather(
        visit.rest.get(f"/adapters/{adapter_id}/grants", limit=100), requests_of_adapter(visit.rest, adapter)
    )
    is_active, model = adapter["state"] == "active", adapter["model"]
    serves, refuses = f"{model} answers, under all its names", f"{model} answers no new request, under any name"
    others = [grant["tenant"] for grant in grants["data"]]
    return Confirmation(
        title=f"Take {model} out of service" if is_active else f"Put {model} back into service",
        before=serves if is_active else refuses,
        after=refuses if is_active else serves,
        affects=f"Callers of {adapter['tenant']}"
        + (f" and of {', '.join(others[:5])}{' and others' if len(others) > 5 else ''}" if others else "")
        + ", from the next request on. Running requests finish.",
        undo="One click on the adapter's page. Versions, aliases and grants stay as they are.",
        verb="Take it out of service" if is_active else "Put it back",
        path=f"/adapters/{adapter_id}/state",
        back=f"/adapters/{adapter_id}",
        back_label=model,
        fields={"state": "disabled" if is_active else "active"},
        facts=[("Requests", used)],
        is_danger=is_active,
    ).ask(visit)


async def set_disabled(visit: Visit) -> Response:
    """Take the adapter out of service, or back into it."""
    verb = "disable" if visit.form.text("state") == "disabled" else "enable"
    await visit.rest.post(f"/adapters/{visit.param('adapter_id')}/{verb}")
    done = "answers no new request" if verb == "disable" else "answers requests again"
    undo = visit.url(f"/adapters/{visit.param('adapter_id')}/state")
    return visit.done(f"The adapter {done}.", f"/adapters/{visit.param('adapter_id')}", undo)


async def confirm_delete(visit: Visit) -> Response:
    adapter = await visit.rest.get(f"/adapters/{visit.param('adapter_id')}")
    return Confirmation(
        title=f"Delete {adapter['model']}",
        before=f"{adapter['model']} has no version yet",
        after="Its name is free",
        affects="Nobody: an adapter that ever had a version can only be taken out of service.",
        undo="Make it again; it gets another identifier.",
        verb="Delete it",
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
        raise InvalidRequest("say which tenant may call it", param="tenant")
    await visit.rest.call("PUT", f"/adapters/{visit.param('adapter_id')}/grants/{tenant}")
    return visit.done(f"{tenant} may call this adapter, and pays for its calls.")


async def confirm_remove_grant(visit: Visit) -> Response:
    adapter = await visit.rest.get(f"/adapters/{visit.param('adapter_id')}")
    tenant = visit.query("tenant") or ""
    return Confirmation(
        title=f"Take the grant of {tenant} back",
        before=f"{tenant} may call {adapter['model']}",
        after=f"{adapter['model']} is 404 for {tenant}",
        affects=f"Callers of {tenant}, from the next request on. Running requests finish.",
        undo="Grant it again on the adapter's page.",
        verb="Take it back",
        path=f"/adapters/{adapter['id']}/grants/remove",
        back=f"/adapters/{adapter['id']}",
        back_label=adapter["model"],
        fields={"tenant": tenant},
    ).ask(visit)


async def remove_grant(visit: Visit) -> Response:
    adapter_id, tenant = visit.param("adapter_id"), visit.form.text("tenant")
    await visit.rest.delete(f"/adapters/{adapter_id}/grants/{tenant}")
    return visit.done(f"{tenant} may not call this adapter any more.", f"/adapters/{adapter_id}")
