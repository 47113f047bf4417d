"""Tenants: the list, and one of them with what it may use and has used."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.responses import Response

from loramux.admin.console.panels import panel
from loramux.admin.console.rest_calls import RestCalls, RestError
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
    made = await visit.rest.post("/tenants", body)
    return visit.done(f"Made the tenant {made['slug']}. Give it a key next.", f"/tenants/{made['slug']}")


async def show(visit: Visit) -> Response:
    """One tenant with its quotas as bars, keys, adapters and use."""
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
    """Suspend a tenant or take it back; change its name, weight or timezone, unless somebody else just did."""
    form = visit.form
    body: dict[str, Any] = {name: form.text(name) for name in ("state", "display_name", "timezone") if form.text(name)}
    if (weight := form.optional_integer("weight", "the weight")) is not None:
        body["weight"] = weight
    slug = visit.param("tenant")
    try:
        await visit.rest.call("PATCH", f"/tenants/{slug}", body, etag=form.text("etag"))
    except RestError as error:
        if error.status != 412:
            raise
        raise InvalidRequest(
            f"somebody has changed {slug} since you opened this page, and nothing was changed: look again"
        ) from None
    return visit.done(f"Changed {slug}.")


async def _use(rest: RestCalls, tenant: str | None = None) -> dict[str, Any]:
    now = int(time.time())
    page = await rest.get("/usage", start=now - DAY_S, end=now + 1, group_by="tenant", tenant=tenant)
    return {row["tenant"]: row for bucket in page["data"] for row in bucket["results"]}
