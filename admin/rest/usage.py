"""`/usage`: what was used, as sums (JSON in pages of buckets, or CSV) and as single requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from typing_extensions import TypedDict

from loramux.admin.rest.access import Reader, Services, tenant_filter
from loramux.admin.rest.listing import After, Before, Document, Limit, ListDocument, TenantParam, list_document, seconds
from loramux.platform.error_responses import json_response
from loramux.platform.ledger import UsageEvent
from loramux.platform.openapi import answers_rows
from loramux.platform.usage_csv import usage_csv
from loramux.platform.usage_report import UsageRow

router = APIRouter(prefix="/usage", tags=["usage"])

DEFAULT_RANGE_US = 30 * 86_400_000_000

Time = Annotated[int | None, Query(ge=0, lt=2**40, description="Seconds since 1970.")]


class UsageResult(TypedDict):
    """A sum, beside the fields that it is grouped by."""

    object: Literal["usage.result"]
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class UsageBucket(TypedDict):
    """The sums of one span of time, [start_time, end_time)."""

    object: Literal["bucket"]
    start_time: int
    end_time: int
    results: list[UsageResult]


class UsagePage(TypedDict):
    """A report, bucket by bucket."""

    object: Literal["page"]
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None


class UsageEventDocument(TypedDict):
    """One settled request."""

    id: str
    object: Literal["usage.event"]
    tenant_id: str
    tenant: str
    api_key_id: str
    adapter_id: str | None
    adapter_version_id: str | None
    model: str
    endpoint: str
    status: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    started_at: int
    finished_at: int
    time_to_first_token_us: int | None
    duration_us: int


@router.get("", responses=answers_rows(UsagePage))
async def get_usage(
    services: Services,
    caller: Reader,
    tenant: TenantParam = None,
    start: Time = None,
    end: Time = None,
    bucket: Annotated[Literal["1m", "1h", "1d"] | None, Query()] = None,
    group_by: Annotated[str, Query(max_length=200, description="Comma-separated.")] = "tenant,model",
    format: Annotated[Literal["json", "csv"], Query()] = "json",  # noqa: A002 - DESIGN names the parameter so
) -> Response:
    """Sums of what finished in [start, end); by default the last 30 days until now."""
    tenant_id = await tenant_filter(services, caller, tenant)
    # What finished in this very microsecond is part of "until now".
    end_us = services.database.now_us() + 1 if end is None else end * 1_000_000
    start_us = max(0, end_us - DEFAULT_RANGE_US) if start is None else start * 1_000_000
    groups = tuple(name for name in group_by.split(",") if name)
    rows = await services.call(services.ledger.report, tenant_id, start_us, end_us, bucket, groups)
    if format == "csv":
        return Response(
            "".join(usage_csv(rows, groups)),
            media_type="text/csv",
            headers={"content-disposition": 'attachment; filename="usage.csv"'},
        )
    return json_response({"object": "page", "data": _buckets(rows, groups), "has_more": False, "next_page": None})


@router.get("/events")
async def list_events(
    services: Services,
    caller: Reader,
    tenant: TenantParam = None,
    start: Time = None,
    end: Time = None,
    limit: Limit = 20,
    after: After = None,
    before: Before = None,
) -> ListDocument[UsageEventDocument]:
    """Settled requests, one by one."""
    tenant_id = await tenant_filter(services, caller, tenant)
    start_us = None if start is None else start * 1_000_000
    end_us = None if end is None else end * 1_000_000
    page = await services.call(services.ledger.events, tenant_id, limit, after, before, start_us, end_us)
    return list_document(page, _describe_event)


def _buckets(rows: Sequence[UsageRow], groups: Sequence[str]) -> list[Document]:
    return [
        {
            "object": "bucket",
            "start_time": start_us // 1_000_000,
            "end_time": -(-end_us // 1_000_000),
            "results": [_describe_row(row, groups) for row in bucket],
        }
        for (start_us, end_us), bucket in groupby(rows, lambda row: (row.start_us, row.end_us))
    ]


def _describe_row(row: UsageRow, groups: Sequence[str]) -> Document:
    fields = asdict(row)
    return {
        "object": "usage.result",
        **{name: fields[name] for name in groups},
        "requests": row.requests,
        "prompt_tokens": row.prompt_tokens,
        "cached_tokens": row.cached_tokens,
        "completion_tokens": row.completion_tokens,
    }


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
        "endpoint": event.endpoint,
        "status": event.status,
        "prompt_tokens": event.prompt_tokens,
        "cached_tokens": event.cached_tokens,
        "completion_tokens": event.completion_tokens,
        "started_at": seconds(event.started_us),
        "finished_at": seconds(event.finished_us),
        "time_to_first_token_us": None if event.first_token_us is None else event.first_token_us - event.started_us,
        "duration_us": event.finished_us - event.started_us,
    }
