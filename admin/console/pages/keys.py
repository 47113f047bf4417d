"""Creates, rotates and revokes keys. A secret is shown only once."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from loramux.admin.console.confirmation import Confirmation
from loramux.admin.console.rest_calls import Document
from loramux.admin.console.visit import Visit

DAY_S = 86_400
TENANT_SCOPES = {
    "adapters": "call the tenant's adapters",
    "base": "call the base model",
    "tenant:read": "view the tenant",
    "tenant:develop": "add adapters and versions",
    "tenant:admin": "administer the tenant",
}
GRACES = (("86400", "in a day"), ("3600", "in an hour"), ("604800", "in a week"), ("0", "immediately"))
PLATFORM_SCOPES = {"platform:read": "view everything", "platform:admin": "change everything"}


async def show_list(visit: Visit) -> Response:
    """List a tenant's keys, or the platform's own keys if no tenant is chosen."""
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
        # Always sent, because the defaults of the call grant more than a form without a chosen scope shows.
        "scopes": form.all("scope"),
    }
    if adapters := [name.strip() for name in form.text("adapters").split(",") if name.strip()]:
        body["adapters"] = adapters
    if (days := form.optional_integer("days", "the number of days")) is not None:
        body["expires_in_s"] = days * DAY_S
    body |= {name: form.text(name) for name in ("max_service_tier", "default_service_tier") if form.text(name)}
    return await _shown_once(visit, await visit.post_once("/api_keys", body), "Created")


async def confirm_rotate(visit: Visit) -> Response:
    key, owner, used = await _facts(visit)
    return Confirmation(
        title=f"Rotate {key['name']}",
        before=f"Callers use the current secret of {owner}'s key {key['name']}",
        after="The key has a new secret, which is shown once; the old secret expires as chosen below",
        affects="Callers that still use the old secret when it expires. "
        "The key's identifier, scopes and limits do not change.",
        undo="Not possible: an expired secret stays invalid. The key can be rotated again.",
        verb="Rotate",
        path=f"/keys/{key['id']}/rotate",
        back="/keys",
        back_label="Keys",
        facts=_shown(key, used),
        fields={"once": visit.once()},
        choices=GRACES,
        choice_name="grace_s",
        choice_label="The old secret expires",
        is_danger=False,
    ).ask(visit)


async def rotate(visit: Visit) -> Response:
    """Give the key a new secret. The old secret stays valid for the grace period chosen in the form."""
    body: dict[str, Any] = {}
    if (grace_s := visit.form.optional_integer("grace_s", "the grace period")) is not None:
        body["grace_s"] = grace_s
    key_id = visit.param("key_id")
    made = await visit.post_once(f"/api_keys/{key_id}/rotate", body)
    if made["secret"] and key_id == visit.session.principal.key_id:
        # Otherwise, the session would end before the browser loads the page that shows the secret.
        visit.session.now_holds(made["secret"])
    return await _shown_once(visit, made, "Rotated")


async def confirm_revoke(visit: Visit) -> Response:
    key, owner, used = await _facts(visit)
    is_own = key["id"] == visit.session.principal.key_id
    return Confirmation(
        title=f"Revoke {key['name']}",
        before=f"The key {key['name']} of {owner} is valid for its scopes",
        after="The key is permanently invalid",
        affects="Its users, within five seconds; running requests finish."
        + (" You are signed in with this key: your session ends." if is_own else ""),
        undo="Not possible. Create another key for its users. To change only the secret, rotate the key instead.",
        verb="Revoke",
        path=f"/keys/{key['id']}/revoke",
        back="/keys",
        back_label="Keys",
        facts=_shown(key, used),
    ).ask(visit)


async def revoke(visit: Visit) -> Response:
    key = await visit.rest.delete(f"/api_keys/{visit.param('key_id')}")
    said = f"The key {key['name']} is revoked; all gateways refuse it within five seconds."
    visit.session.say("done", said)
    return visit.go("/keys", tenant=_tenant_of(visit, key))


async def _facts(visit: Visit) -> tuple[Document, str, str]:
    key = await visit.rest.get(f"/api_keys/{visit.param('key_id')}")
    if key["tenant_id"] is None:
        return key, "the platform", ""
    now = visit.rest.now
    page = await visit.rest.get("/usage", start=now - DAY_S, end=now + 1, group_by="key", tenant=key["tenant"])
    rows = [row for bucket in page["data"] for row in bucket["results"] if row["key"] == key["id"]]
    return key, key["tenant"], f"{sum(row['requests'] for row in rows):,} in the last 24 hours"


def _shown(key: Document, used: str) -> list[tuple[str, str]]:
    facts = [("Identifier", key["id"]), ("Scopes", ", ".join(key["scopes"]))]
    return [*facts, ("Requests with this key", used)] if used else facts


def _tenant_of(visit: Visit, key: Document) -> str | None:
    return key["tenant"] if visit.is_platform else None


async def _shown_once(visit: Visit, made: Document, verb: str) -> Response:
    # A form that was sent twice gets no secret the second time. The notice of the first time shows it.
    if made["secret"]:
        visit.session.say(
            "secret", f"{verb} the key {made['name']}. Copy its secret now: it is not shown again.", made["secret"]
        )
    return visit.go("/keys", tenant=_tenant_of(visit, made))
