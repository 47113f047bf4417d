"""Tenants: the list, and a tenant's page with its quotas and usage."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response

from loramux.admin.console.confirmation import Confirmation, counted
from loramux.admin.console.panels import panel
from loramux.admin.console.rest_calls import Document, RestCalls, RestError
from loramux.admin.console.visit import Visit
from loramux.platform.errors import InvalidRequest

DAY_S = 86_400
USE_FRESH_S = 15.0


async def show_list(visit: Visit) -> Response:
    if not visit.is_platform:
        return visit.go(f"/tenants/{visit.session.principal.tenant_slug}")
    found = visit.query("name")
    if found is not None:
        return visit.go(f"/tenants/{found}")
    page, use = await asyncio.gather(
        visit.rest.get("/tenants", limit=50, after=visit.query("after")),
        visit.site.recent.get(("use of tenants", visit.sees), USE_FRESH_S, lambda: panel(_use(visit.rest))),
    )
    return visit.page("tenants.html", tenants=page, use=use)


async def create(visit: Visit) -> Response:
    form = visit.form
    body = {"slug": form.text("slug"), "display_name": form.optional("display_name")}
    made = await visit.post_once("/tenants", body)
    return visit.done(f"Created the tenant {made['slug']}. Next, create a key for it.", f"/tenants/{made['slug']}")


async def show(visit: Visit) -> Response:
    rest = visit.rest
    tenant, headers = await rest.call("GET", f"/tenants/{visit.param('tenant')}")
    slug = tenant["slug"]
    effective, adapters, keys, use = await asyncio.gather(
        panel(rest.get("/quotas/effective", tenant=slug)),
        panel(rest.get("/adapters", tenant=slug, limit=10)),
        panel(rest.get("/api_keys", tenant=slug, limit=10)),
        panel(_use(rest, slug)),
    )
    return visit.page(
        "tenant.html",
        tenant=tenant,
        limits=effective,
        adapters=adapters,
        keys=keys,
        use=use,
        etag=headers["etag"],
    )


async def change(visit: Visit) -> Response:
    """Suspend or resume a tenant, or change its settings, unless someone else has changed it."""
    form = visit.form
    body: dict[str, Any] = {name: form.text(name) for name in ("state", "display_name", "timezone") if form.text(name)}
    if (weight := form.optional_integer("weight", "the weight")) is not None:
        body["weight"] = weight
    if (days := form.optional_integer("response_days", "the number of days")) is not None:
        body["response_days"] = days
    body |= {name: form.text(name) for name in ("max_service_tier", "default_service_tier") if form.text(name)}
    slug = visit.param("tenant")
    try:
        await visit.rest.call("PATCH", f"/tenants/{slug}", body, etag=form.text("etag"))
    except RestError as error:
        if error.status != 412:
            raise
        raise InvalidRequest(
            f"someone has changed {slug} since you opened this page, and nothing was changed: check its current state"
        ) from None
    undo = visit.url(f"/tenants/{slug}/state") if "state" in body else ""
    return visit.done(f"Changed {slug}.", f"/tenants/{slug}", undo)


async def confirm_state(visit: Visit) -> Response:
    tenant, headers = await visit.rest.call("GET", f"/tenants/{visit.param('tenant')}")
    slug, is_active = tenant["slug"], tenant["state"] == "active"
    keys, running, use = await asyncio.gather(
        visit.rest.get("/api_keys", tenant=slug, limit=100),
        visit.rest.get("/requests", tenant=slug, limit=100),
        _use(visit.rest, slug),
    )
    now = visit.rest.now
    keys["data"] = [key for key in keys["data"] if not key["revoked_at"] and (key["expires_at"] or now + 1) > now]
    active, suspended = (
        f"{slug} is active, with {_some(keys, 'usable key')}",
        f"{slug} is suspended: its keys are refused",
    )
    kept = f" Running requests finish, and other tenants can still call the adapters that {slug} has granted them."
    return Confirmation(
        title=f"Suspend {slug}" if is_active else f"Resume {slug}",
        before=active if is_active else suspended,
        after=suspended if is_active else active,
        affects=f"Callers from {slug} and its users in this console, within five seconds.{kept if is_active else ''}",
        undo="One click on the tenant's page. Keys, adapters, quotas and usage stay as they are.",
        verb=f"Suspend {slug}" if is_active else f"Resume {slug}",
        path=f"/tenants/{slug}",
        back=f"/tenants/{slug}",
        back_label=slug,
        fields={"state": "suspended" if is_active else "active", "etag": headers["etag"]},
        facts=[
            ("Running now", _some(running, "request")),
            ("In the last 24 hours", counted(use.get(slug, {"requests": 0})["requests"], "request")),
        ],
        is_danger=is_active,
    ).ask(visit)


async def confirm_delete(visit: Visit) -> Response:
    tenant = await visit.rest.get(f"/tenants/{visit.param('tenant')}")
    slug = tenant["slug"]
    return Confirmation(
        title=f"Delete {slug}",
        before=f"{slug} has no adapters, no unrevoked keys, no prices and no usage",
        after="The slug is free again",
        affects="Nobody: a tenant with adapters, unrevoked keys, prices or usage can only be suspended and purged.",
        undo="Create it again; it gets a new identifier.",
        verb="Delete",
        path=f"/tenants/{slug}/delete",
        back=f"/tenants/{slug}",
        back_label=slug,
    ).ask(visit)


async def delete(visit: Visit) -> Response:
    slug = visit.param("tenant")
    await visit.rest.delete(f"/tenants/{slug}")
    return visit.done(f"{slug} is deleted.", "/tenants")


def _some(page: Document, one: str) -> str:
    return counted(len(page["data"]), one) + (" and more" if page["has_more"] else "")


async def _use(rest: RestCalls, tenant: str | None = None) -> dict[str, Any]:
    now = rest.now
    page = await rest.get("/usage", start=now - DAY_S, end=now + 1, group_by="tenant", tenant=tenant)
    return {row["tenant"]: row for bucket in page["data"] for row in bucket["results"]}
