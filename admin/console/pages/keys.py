"""Keys: made, shown once, rotated, revoked."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from loramux.admin.console.rest_calls import Document
from loramux.admin.console.visit import Visit

DAY_S = 86_400
TENANT_SCOPES = {
    "adapters": "call the tenant's adapters",
    "base": "call the base model",
    "tenant:read": "look at the tenant's things",
    "tenant:develop": "bring adapters and versions",
    "tenant:admin": "change the tenant's things",
}
PLATFORM_SCOPES = {"platform:read": "look at everything", "platform:admin": "change everything"}


async def show_list(visit: Visit) -> Response:
    """A tenant's keys; for the platform, its own where no tenant is chosen."""
    tenant = visit.query("tenant")
    page = await visit.rest.get("/api_keys", tenant=tenant, limit=50, after=visit.query("after"))
    of_platform = visit.is_platform and tenant is None
    return visit.page(
        "keys.html",
        keys=page,
        tenant=tenant,
        scopes=PLATFORM_SCOPES if of_platform else TENANT_SCOPES,
    )


async def create(visit: Visit) -> Response:
    form = visit.form
    body: dict[str, Any] = {
        "tenant": form.optional("tenant") if visit.is_platform else visit.session.principal.tenant_slug,
        "name": form.text("name") or "default",
    }
    if scopes := form.all("scope"):
        body["scopes"] = scopes
    if adapters := [name.strip() for name in form.text("adapters").split(",") if name.strip()]:
        body["adapters"] = adapters
    if (days := form.optional_integer("days", "the number of days")) is not None:
        body["expires_in_s"] = days * DAY_S
    return _shown_once(visit, await visit.rest.post("/api_keys", body), "Made")


async def rotate(visit: Visit) -> Response:
    """A new secret; the old key goes on for the grace that the form names."""
    body: dict[str, Any] = {}
    if (grace_s := visit.form.optional_integer("grace_s", "the grace")) is not None:
        body["grace_s"] = grace_s
    key_id = visit.param("key_id")
    made = await visit.rest.post(f"/api_keys/{key_id}/rotate", body)
    if key_id == visit.session.principal.key_id:
        # Or the answer, which shows the secret, would find the session ended.
        visit.session.now_holds(made["secret"])
    return _shown_once(visit, made, "Rotated")


async def revoke(visit: Visit) -> Response:
    key = await visit.rest.delete(f"/api_keys/{visit.param('key_id')}")
    return visit.done(f"The key {key['name']} is revoked; it opens nothing within five seconds.")


def _shown_once(visit: Visit, made: Document, verb: str) -> Response:
    visit.session.say(
        "secret", f"{verb} the key {made['name']}. Copy its secret now: it is not shown again.", made["secret"]
    )
    return visit.back()
