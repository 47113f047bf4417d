"""`/usage`: usage totals, individual requests, and exports of any length."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response

from loramux.admin.rest.access import Reader, Services, tenant_filter
from loramux.admin.rest.held_response import HeldResponse
from loramux.admin.rest.listing import (
    Document,
    ListDocument,
    Paging,
    TenantParam,
    list_document,
    micros,
    paged,
    seconds,
)
from loramux.admin.rest.usage.usage_documents import UsageEventDocument, UsagePage
from loramux.admin.rest.usage.usage_query import (
    DEFAULT_RANGE_US,
    MEDIA_TYPES,
    Report,
    Time,
    attachment,
    report_response,
)
from loramux.migrations.paging import Page
from loramux.platform.errors import InvalidRequest
from loramux.platform.ledger.csv_lines import csv_line, csv_lines, ndjson_line
from loramux.platform.ledger.events import UsageEvent
from loramux.platform.ledger.report import UsageRow
from loramux.platform.requests.openapi import answers_rows

router = APIRouter(prefix="/usage", tags=["usage"])

AMOUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")


@router.get("", responses=answers_rows(UsagePage))
async def get_usage(services: Services, caller: Reader, wanted: Report) -> Response:
    """Report the usage of requests that finished in [start, end). The default is the last 30 days, including today.

    Prompt tokens include cached tokens. An adjustment to a request counts at the time of the adjustment. With `top`,
    `num_results` counts all groups, and `total` is the sum over all groups.
    """

    def describe(row: UsageRow) -> Document:
        amounts = {name: getattr(row, name) for name in AMOUNTS}
        return {"object": "usage.result", **amounts}

    return await report_response(services, caller, "usage", wanted, describe, AMOUNTS, {})


@router.get("/events")
@paged
async def list_events(
    services: Services, caller: Reader, paging: Paging, tenant: TenantParam = None, start: Time = None, end: Time = None
) -> ListDocument[UsageEventDocument]:
    """List settled requests."""
    tenant_id = await tenant_filter(services, caller, tenant)

    def read() -> Page[UsageEvent]:
        return services.usage.ledger.events(tenant_id, *paging, micros(start), micros(end), caller.adapter_ids)

    caller.release_call_slot()
    page = await services.report(caller.principal, read)
    return list_document(page, _describe_event)


@router.get("/events/export", response_class=Response, responses=answers_rows())
async def export_events(
    services: Services,
    caller: Reader,
    tenant: TenantParam = None,
    start: Time = None,
    end: Time = None,
    format: Annotated[Literal["csv", "ndjson"], Query()] = "ndjson",  # noqa: A002 - the query parameter's name
) -> Response:
    """Export all settled requests that finished in [start, end), in the order in which they finished. The default is
    the last 30 days.

    The export is streamed and can have any length. A client that stops reading is disconnected.
    """
    tenant_id = await tenant_filter(services, caller, tenant)
    end_us = services.database.now_us() + 1 if end is None else end * 1_000_000
    start_us = max(0, end_us - DEFAULT_RANGE_US) if start is None else start * 1_000_000
    if start_us >= end_us:
        raise InvalidRequest("end must be after start", param="end")

    async def read(after: UsageEvent | None, is_first: bool = False) -> tuple[UsageEvent | None, str]:
        """Read the next part of the export. Return its last event, or None if it is empty, and its text."""

        def spelled() -> tuple[UsageEvent | None, str]:
            events = services.usage.ledger.export(tenant_id, start_us, end_us, after, caller.adapter_ids)
            return (events[-1] if events else None), "".join(_lines(events, format))

        # An export that has started must not fail because the caller has other reports in progress.
        return await services.report(caller.principal, spelled, is_patient=not is_first)

    async def body(last: UsageEvent | None, part: str) -> AsyncIterator[str]:
        yield csv_line(_EVENT_COLUMNS) if format == "csv" else ""
        while last is not None:
            yield part
            last, part = await read(last)

    caller.release_call_slot()
    release_slot = await services.slots.exports.acquire_slot(caller.principal.holder)
    try:
        # Read the first part now, so that a database failure gives an error instead of a truncated export.
        first = await read(None, is_first=True)
    except BaseException:
        release_slot()
        raise
    return HeldResponse(body(*first), release_slot, attachment("usage-events", format), MEDIA_TYPES[format])


def _lines(events: Sequence[UsageEvent], kind: str) -> list[str]:
    documents = [_describe_event(event) for event in events]
    return list(csv_lines(documents, _EVENT_COLUMNS)) if kind == "csv" else [ndjson_line(item) for item in documents]


_EVENT_COLUMNS = (
    "id",
    "tenant_id",
    "tenant",
    "api_key_id",
    "adapter_id",
    "adapter_version_id",
    "model",
    "base",
    "endpoint",
    "end_user",
    "service_tier",
    "status",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "cost_nanos",
    "price_id",
    "started_at",
    "finished_at",
    "time_to_first_token_us",
    "duration_us",
)


def _describe_event(event: UsageEvent) -> UsageEventDocument:
    return {
        "id": event.request_id,
        "object": "usage.event",
        "tenant_id": event.tenant_id,
        "tenant": event.tenant,
        "api_key_id": event.api_key_id,
        "adapter_id": event.adapter_id,
        "adapter_version_id": event.adapter_version_id,
        "model": event.model,
        "base": event.base,
        "endpoint": event.endpoint,
        "end_user": event.end_user,
        "service_tier": event.service_tier,
        "status": event.status,
        "prompt_tokens": event.prompt_tokens,
        "cached_tokens": event.cached_tokens,
        "completion_tokens": event.completion_tokens,
        "cost_nanos": event.cost_nanos,
        "price_id": event.price_id,
        "started_at": seconds(event.started_us),
        "finished_at": seconds(event.finished_us),
        "time_to_first_token_us": None if event.first_token_us is None else event.first_token_us - event.started_us,
        "duration_us": event.finished_us - event.started_us,
    }
