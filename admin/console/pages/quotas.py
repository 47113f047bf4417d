"""Quotas: the limits of each tenant, with a preview before a change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from loramux.admin.console.confirmation import Confirmation
from loramux.admin.console.forms import Form
from loramux.admin.console.panels import panel
from loramux.admin.console.rest_calls import Document, RestError
from loramux.admin.console.visit import Visit, refusal_text
from loramux.platform.amounts import amount_of, amount_text, money_text
from loramux.platform.errors import ApiError, InvalidRequest
from loramux.platform.quotas.metrics import METRICS, Unit
from loramux.platform.quotas.policies import MODES

MODE_WORDS = {
    "hard": "excess is refused",
    "soft": "excess is admitted and reported",
    "shadow": "excess is only counted",
}
SUBJECTS = ("tenant", "key", "adapter")
"""Fields that name what a limit limits. Without them, it is a limit for every tenant."""
AFTER_REMOVAL = {
    "tenant": "No limit of its own: the limit for every tenant applies, if there is one",
    "platform": "No limit for tenants without a limit of their own",
}
PROMPT_TOKENS, MAX_TOKENS = 100, 200
"""Default prompt and completion lengths for a dry run, in tokens."""


async def show_list(visit: Visit) -> Response:
    tenant = visit.query("tenant") or visit.session.principal.tenant_slug
    page = await visit.rest.get("/quotas", tenant=tenant, limit=100, after=visit.query("after"))
    effective = await panel(visit.rest.get("/quotas/effective", tenant=tenant)) if tenant else None
    return visit.page(
        "quotas.html",
        quotas=page,
        tenant=tenant,
        metrics=METRICS,
        modes=MODES,
        seen=shown_state,
        bars=bars_of(effective.data) if effective and effective.data else {},
        editable=editable,
        whose=whose,
    )


async def preview(visit: Visit) -> Response:
    """Show whether a request would be admitted under the limit in the form. Nothing changes.

    An error is shown in the same place, because the form's dialog covers the notices of the page.
    """
    try:
        return visit.page("quota_check.html", answer=await _checked(visit), problem=None)
    except (ApiError, RestError) as error:
        return visit.page("quota_check.html", error.status, answer=None, problem=refusal_text(error))


async def _checked(visit: Visit) -> Document:
    form = visit.form
    metric = _metric(form)
    if not form.text("tenant"):
        raise InvalidRequest("enter a tenant to try the limit", param="tenant")
    quota: dict[str, Any] = {"tenant": form.text("tenant"), "metric": metric, "limit": _amount(form, "limit", metric)}
    if (burst := _burst(form, metric)) is not None:
        quota["burst"] = burst
    if mode := form.text("mode"):
        quota["mode"] = mode
    return await visit.rest.post(
        "/quotas/check",
        {
            "tenant": form.text("tenant"),
            "prompt_tokens": form.optional_integer("prompt_tokens", "prompt tokens") or PROMPT_TOKENS,
            "max_tokens": form.optional_integer("max_tokens", "max tokens") or MAX_TOKENS,
            "quota": quota,
        },
    )


async def set_limit(visit: Visit) -> Response:
    """Set a limit, unless someone else has changed it since the form was shown."""
    form = visit.form
    metric = _metric(form)
    body: dict[str, Any] = {"metric": metric, "limit": _amount(form, "limit", metric)}
    if (burst := _burst(form, metric)) is not None:
        body["burst"] = burst
    if mode := form.text("mode"):
        body["mode"] = mode
    if quota_id := form.text("quota_id"):
        if METRICS[metric].kind == "rate":
            # An absent burst would stay as it is, and the form says that an empty one is the limit.
            body.setdefault("burst", body["limit"])
        quota = await _change(visit, quota_id, body)
    else:
        subject = {name: form.text(name) for name in SUBJECTS if form.text(name)} or {"scope": "platform"}
        quota = await visit.rest.post("/quotas", {**body, **subject})
    # After a confirmation, do not return to the confirmation page.
    path = "/quotas" if form.text("is_confirmed") else None
    return visit.done(
        f"{quota['metric']} of {whose(quota)} is now {amount_text(quota['limit'], quota['unit'])}"
        f"{'' if quota['mode'] == 'hard' else ', in mode ' + quota['mode']}.",
        path,
    )


async def confirm_delete(visit: Visit) -> Response:
    quota = await visit.rest.get(f"/quotas/{visit.param('quota_id')}")
    metric, limit = quota["metric"].replace("_", " "), amount_text(quota["limit"], quota["unit"])
    facts = []
    if quota["tenant_id"] is not None:
        effective = await visit.rest.get("/quotas/effective", **_subject(quota))
        used = [
            f"{amount_text(one['used'] + one['reserved'], one['unit'])} of {amount_text(one['burst'], one['unit'])}"
            for one in effective["data"]
            if one["id"] == quota["id"]
        ]
        facts = [("In use now", used[0])] if used else []
    return Confirmation(
        title=f"Remove {metric} of {whose(quota)}",
        before=f"At most {limit}; {MODE_WORDS[quota['mode']]}",
        after=AFTER_REMOVAL.get(quota["scope"], "No limit of its own: the limits of the tenant stay"),
        affects=f"{_capitalized(whose(quota))}, from the next request on.",
        undo="Set it again, from the notice after the removal. Counting starts over.",
        verb="Remove",
        path=f"/quotas/{quota['id']}/delete",
        back="/quotas",
        back_label="Quotas",
        fields={"tenant": quota["tenant"] or ""},
        facts=facts,
    ).ask(visit)


async def delete(visit: Visit) -> Response:
    quota = await visit.rest.get(f"/quotas/{visit.param('quota_id')}")
    await visit.rest.delete(f"/quotas/{quota['id']}")
    again = {"metric": quota["metric"], "mode": quota["mode"], **_subject(quota)}
    again["limit"] = editable(quota["limit"], quota["unit"])
    if METRICS[quota["metric"]].kind == "rate":
        again["burst"] = editable(quota["burst"], quota["unit"])
    undo = visit.url("/quotas/again", **again)
    visit.session.say("done", f"Removed the limit on {quota['metric'].replace('_', ' ')}.", undo_url=undo)
    return visit.go("/quotas", tenant=visit.form.optional("tenant"))


async def confirm_again(visit: Visit) -> Response:
    asked = Form(visit.request.query_params.multi_items())
    metric, tenant = _metric(asked), asked.text("tenant")
    scope = next((name for name in SUBJECTS[1:] if asked.text(name)), "tenant")
    owner = whose({"scope": scope, "tenant": tenant, "subject": asked.text(scope)})
    limit = amount_text(_amount(asked, "limit", metric), METRICS[metric].unit)
    burst = _burst(asked, metric)
    at_once = "" if burst is None else f", burst {amount_text(burst, METRICS[metric].unit)}"
    return Confirmation(
        title=f"Set {metric.replace('_', ' ')} of {owner} again",
        before="No limit of its own",
        after=f"At most {limit}{at_once}; {MODE_WORDS.get(asked.text('mode'), 'hard')}",
        affects=f"{_capitalized(owner)}, from the next request on; running requests are not counted.",
        undo="Remove it again.",
        verb="Set the limit again",
        path="/quotas",
        back="/quotas",
        back_label="Quotas",
        fields={name: asked.text(name) for name in (*SUBJECTS, "metric", "limit", "burst", "mode")}
        | {"is_confirmed": "yes"},
        is_danger=False,
    ).ask(visit)


def whose(quota: Document) -> str:
    """Return what a limit limits: `every tenant`, `acme`, `the key nightly of acme` or `the adapter acme/voice`."""
    if quota["scope"] in AFTER_REMOVAL:
        return str(quota["tenant"] or "every tenant")
    subject = f"the {quota['scope']} {quota['subject']}"
    return subject if quota["scope"] == "adapter" else f"{subject} of {quota['tenant']}"


def _subject(quota: Document) -> dict[str, str | None]:
    """Return the fields of a call that name what a limit limits."""
    subject = {"tenant": quota["tenant"]}
    return subject if quota["scope"] in AFTER_REMOVAL else {**subject, quota["scope"]: quota["subject_id"]}


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def bars_of(effective: Document) -> dict[str, Document]:
    return {limit["id"]: limit for limit in effective["data"]}


def shown_state(quota: Mapping[str, Any]) -> str:
    return f"{quota['limit']}/{quota['burst']}/{quota['mode']}/{quota['updated_at']}"


def editable(value: int, unit: str) -> str:
    """Write an amount exactly, as the form reads it: money in the currency, anything else as a whole number."""
    return money_text(value).replace(",", "") if unit == Unit.NANOS else str(value)


async def _change(visit: Visit, quota_id: str, body: Mapping[str, Any]) -> Document:
    try:
        current, headers = await visit.rest.call("GET", f"/quotas/{quota_id}")
    except RestError as error:
        if error.status != 404:
            raise
        raise InvalidRequest(
            "someone has removed this limit since you opened the page, and nothing was changed"
        ) from None
    try:
        if visit.form.text("seen") != shown_state(current):
            raise RestError(412, {})
        changed, _ = await visit.rest.call("PATCH", f"/quotas/{quota_id}", body, etag=headers.get("etag"))
    except RestError as error:
        if error.status != 412:
            raise
        now, wanted = (amount_text(quota["limit"], current["unit"]) for quota in (current, body))
        raise InvalidRequest(
            f"someone has set {current['metric']} to {now} since you opened the page, "
            f"and your {wanted} was not saved: set it again if you still want to"
        ) from None
    return changed


def _metric(form: Form) -> str:
    metric = form.text("metric")
    if metric not in METRICS:
        raise InvalidRequest("there is no such metric", param="metric")
    return metric


def _burst(form: Form, metric: str) -> int | None:
    return _amount(form, "burst", metric) if form.text("burst") else None


def _amount(form: Form, name: str, metric: str) -> int:
    if METRICS[metric].unit not in (Unit.NANOS, Unit.BYTES):
        return form.integer(name, f"a {name}")
    try:
        return amount_of(form.text(name), METRICS[metric].unit)
    except ValueError as error:
        raise InvalidRequest(f"{name}: {error}", param=name) from None
