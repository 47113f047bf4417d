"""Quotas: what each tenant may use, and changing that with both eyes open."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from starlette.responses import Response

from loramux.admin.console.forms import Form
from loramux.admin.console.panels import panel
from loramux.admin.console.rest_calls import Document, RestError
from loramux.admin.console.visit import Visit
from loramux.platform.errors import InvalidRequest
from loramux.platform.quota_metrics import METRICS, Unit
from loramux.platform.quotas import MODES

NANOS = 10**9
PROMPT_TOKENS, MAX_TOKENS = 100, 200
"""The request that a dry run asks about unless the form says another."""


async def show_list(visit: Visit) -> Response:
    tenant = visit.query("tenant") or visit.session.principal.tenant_slug
    page = await visit.rest.get("/quotas", tenant=tenant, limit=100, after=visit.query("after"))
    effective = await panel(visit.rest.get("/quotas/effective", tenant=tenant)) if tenant else None
    return visit.page(
        "quotas.html",
        quotas=page,
        tenant=tenant,
        names=await _owners(visit, page["data"]),
        metrics=METRICS,
        modes=MODES,
        seen=shown_state,
        bars=bars_of(effective.data) if effective and effective.data else {},
        editable=editable,
    )


async def preview(visit: Visit) -> Response:
    """What a request would meet under the limit in the form; nothing is changed."""
    form = visit.form
    metric = _metric(form)
    quota: dict[str, Any] = {"tenant": form.text("tenant"), "metric": metric, "limit": _amount(form, "limit", metric)}
    if (burst := _optional_amount(form, "burst", metric)) is not None:
        quota["burst"] = burst
    if mode := form.text("mode"):
        quota["mode"] = mode
    answer = await visit.rest.post(
        "/quotas/check",
        {
            "tenant": form.text("tenant"),
            "prompt_tokens": form.optional_integer("prompt_tokens", "prompt tokens") or PROMPT_TOKENS,
            "max_tokens": form.optional_integer("max_tokens", "most tokens") or MAX_TOKENS,
            "quota": quota,
        },
    )
    return visit.page("quota_check.html", answer=answer)


async def set_limit(visit: Visit) -> Response:
    """Set a limit; one that somebody else changed since the form was shown stays as that somebody left it."""
    form = visit.form
    metric = _metric(form)
    body: dict[str, Any] = {"metric": metric, "limit": _amount(form, "limit", metric)}
    if (burst := _optional_amount(form, "burst", metric)) is not None:
        body["burst"] = burst
    if mode := form.text("mode"):
        body["mode"] = mode
    tenant = form.text("tenant")
    if quota_id := form.text("quota_id"):
        quota = await _change(visit, quota_id, body)
    else:
        quota = await visit.rest.post("/quotas", {**body, **({"tenant": tenant} if tenant else {"scope": "platform"})})
    return visit.done(
        f"{quota['metric']} of {tenant or 'every tenant'} is {shown_amount(quota['limit'], quota['unit'])} from now on"
        f"{'' if quota['mode'] == 'hard' else ', in mode ' + quota['mode']}."
    )


async def delete(visit: Visit) -> Response:
    await visit.rest.delete(f"/quotas/{visit.param('quota_id')}")
    return visit.done("The limit is lifted.")


def bars_of(effective: Document) -> dict[str, Document]:
    """The effective limits by the identifier of their policy."""
    return {limit["id"]: limit for limit in effective["data"]}


def shown_state(quota: Mapping[str, Any]) -> str:
    """What a form remembers of the quota that it was made from."""
    return f"{quota['limit']}/{quota['burst']}/{quota['mode']}/{quota['updated_at']}"


def shown_amount(value: int, unit: str) -> str:
    """Amounts of money are kept in thousand-millionths."""
    return f"{Decimal(value) / NANOS:,.2f}" if unit == Unit.NANOS else f"{value:,}"


def editable(value: int, unit: str) -> str:
    return f"{Decimal(value) / NANOS:f}" if unit == Unit.NANOS else str(value)


async def _change(visit: Visit, quota_id: str, body: Mapping[str, Any]) -> Document:
    try:
        current, headers = await visit.rest.call("GET", f"/quotas/{quota_id}")
    except RestError as error:
        if error.status != 404:
            raise
        raise InvalidRequest(
            "somebody has lifted this limit since you opened the page, and nothing was changed"
        ) from None
    try:
        if visit.form.text("seen") != shown_state(current):
            raise RestError(412, {})
        changed, _ = await visit.rest.call("PATCH", f"/quotas/{quota_id}", body, etag=headers.get("etag"))
    except RestError as error:
        if error.status != 412:
            raise
        now, wanted = (shown_amount(quota["limit"], current["unit"]) for quota in (current, body))
        raise InvalidRequest(
            f"somebody has set {current['metric']} to {now} since you opened the page, "
            f"and your {wanted} was not taken: look at it, and set it again if you still want to"
        ) from None
    return changed


async def _owners(visit: Visit, quotas: list[Document]) -> dict[str, str]:
    """Slugs by the tenants' identifiers."""
    ids = {quota["tenant_id"] for quota in quotas} - {None}
    return {tenant_id: (await visit.rest.get(f"/tenants/{tenant_id}"))["slug"] for tenant_id in sorted(ids)}


def _metric(form: Form) -> str:
    metric = form.text("metric")
    if metric not in METRICS:
        raise InvalidRequest("there is no such metric", param="metric")
    return metric


def _optional_amount(form: Form, name: str, metric: str) -> int | None:
    return _amount(form, name, metric) if form.text(name) else None


def _amount(form: Form, name: str, metric: str) -> int:
    if METRICS[metric].unit is not Unit.NANOS:
        return form.integer(name, f"a {name}")
    try:
        amount = Decimal(form.text(name).replace(",", "")[:40]) * NANOS
    except InvalidOperation:
        amount = Decimal("NaN")
    if not amount.is_finite() or amount != amount.to_integral_value() or abs(amount) > 10**18:
        raise InvalidRequest(f"a {name} is an amount of money", param=name)
    return int(amount)
