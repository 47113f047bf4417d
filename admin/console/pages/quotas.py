"""Quotas: what each tenant may use, and changing that with both eyes open."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from loramux.admin.console.visit import Visit
from loramux.platform.errors import InvalidRequest
from loramux.platform.quota_metrics import METRICS


async def show_list(visit: Visit) -> Response:
    tenant = visit.query("tenant")
    page = await visit.rest.get("/quotas", tenant=tenant, limit=100, after=visit.query("after"))
    names: dict[str, str] = {}
    for quota in page["data"]:
        tenant_id = quota["tenant_id"]
        if tenant_id is not None and tenant_id not in names:
            names[tenant_id] = (await visit.rest.get(f"/tenants/{tenant_id}"))["slug"]
    return visit.page("quotas.html", quotas=page, tenant=tenant, names=names, metrics=tuple(METRICS), seen=shown_state)


async def set_limit(visit: Visit) -> Response:
    """Set a limit; one that somebody else changed since the form was shown stays as that somebody left it."""
    form = visit.form
    body: dict[str, Any] = {
        "tenant": form.text("tenant"),
        "metric": form.text("metric"),
        "limit": form.integer("limit", "a limit"),
    }
    if (burst := form.optional_integer("burst", "a burst")) is not None:
        body["burst"] = burst
    if mode := form.text("mode"):
        body["mode"] = mode
    quota_id, seen = form.text("quota_id"), form.text("seen")
    if quota_id:
        await _require_unchanged(visit, quota_id, seen, body["limit"])
    quota = await visit.rest.post("/quotas", body)
    return visit.done(f"{quota['metric']} of {body['tenant']} is {quota['limit']:,} from now on.")


async def delete(visit: Visit) -> Response:
    await visit.rest.delete(f"/quotas/{visit.param('quota_id')}")
    return visit.done("The limit is lifted.")


async def _require_unchanged(visit: Visit, quota_id: str, seen: str, wanted: int) -> None:
    tenant = visit.form.text("tenant")
    page = await visit.rest.get("/quotas", tenant=tenant, limit=100)
    current = next((quota for quota in page["data"] if quota["id"] == quota_id), None)
    if current is None:
        raise InvalidRequest("somebody has lifted this limit since you opened the page, and nothing was changed")
    if seen != shown_state(current):
        raise InvalidRequest(
            f"somebody has set {current['metric']} to {current['limit']:,} since you opened the page, "
            f"and your {wanted:,} was not taken: look at it, and set it again if you still want to"
        )


def shown_state(quota: dict[str, Any]) -> str:
    """What a form remembers of the quota that it was made from."""
    return f"{quota['limit']}/{quota['burst']}/{quota.get('mode', '')}/{quota['updated_at']}"
