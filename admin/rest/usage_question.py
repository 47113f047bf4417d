"""What `/usage` and `/costs` are asked, and how their answers leave: JSON in pages of buckets, CSV or NDJSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Literal

import msgspec
from fastapi import Depends, Query, Response

from loramux.admin.rest.access import Caller, Services, tenant_filter
from loramux.admin.rest.listing import Document, TenantParam
from loramux.admin.services import AdminServices
from loramux.platform.usage_csv import csv_line, csv_lines, ndjson_line
from loramux.platform.usage_grains import DAY_US
from loramux.platform.usage_question import UsageQuestion
from loramux.platform.usage_report import MAX_TOP, LargestRows, UsageRow, answer, largest

DEFAULT_RANGE_US = 30 * DAY_US

Time = Annotated[int | None, Query(ge=0, lt=2**40, description="Seconds since 1970.")]
Format = Literal["json", "csv", "ndjson"]
MEDIA_TYPES = {"json": "application/json", "csv": "text/csv; charset=utf-8", "ndjson": "application/x-ndjson"}


@dataclass(frozen=True, slots=True)
class Asked:
    """The parameters that both reports share."""

    tenant: str | None
    start: int | None
    end: int | None
    bucket: str | None
    group_by: tuple[str, ...]
    timezone: str
    top: int | None
    format: Format


async def asked(
    tenant: TenantParam = None,
    start: Time = None,
    end: Time = None,
    bucket: Annotated[Literal["1m", "1h", "1d"] | None, Query(description="Split by time.")] = None,
    group_by: Annotated[
        str,
        Query(
            max_length=200,
            description="Comma-separated: tenant, key, adapter, version, model, base, endpoint, end_user, status.",
        ),
    ] = "tenant,model",
    timezone: Annotated[str, Query(max_length=64, description="Whose midnights part days, as Europe/Berlin.")] = "UTC",
    top: Annotated[
        int | None, Query(ge=1, le=MAX_TOP, description="Only so many groups, those of most tokens; without a bucket.")
    ] = None,
    format: Annotated[Format, Query()] = "json",  # noqa: A002 - DESIGN names the parameter so
) -> Asked:
    groups = tuple(name for name in group_by.split(",") if name)
    return Asked(tenant, start, end, bucket, groups, timezone, top, format)


Report = Annotated[Asked, Depends(asked)]


@dataclass(frozen=True, slots=True)
class Answered:
    """The rows, and where only the largest were asked for what all of them make."""

    rows: tuple[UsageRow, ...]
    largest: LargestRows | None = None


async def rows_of(services: Services, caller: Caller, wanted: Asked) -> Answered:
    """What finished in [start, end), by default in the last 30 days; raises InvalidRequest."""
    tenant_id = await tenant_filter(services, caller, wanted.tenant)
    end_us = _until_now(services.database.now_us(), wanted) if wanted.end is None else wanted.end * 1_000_000
    start_us = max(0, end_us - DEFAULT_RANGE_US) if wanted.start is None else wanted.start * 1_000_000
    question = UsageQuestion(
        tenant_id=tenant_id,
        start_us=start_us,
        end_us=end_us,
        bucket=wanted.bucket,
        group_by=wanted.group_by,
        timezone=wanted.timezone,
        adapter_ids=caller.adapter_ids,
    )
    if wanted.top is None:
        return Answered(await services.call(answer, services.database, question))
    found = await services.call(largest, services.database, question, wanted.top)
    return Answered(found.rows, found)


def _until_now(now_us: int, wanted: Asked) -> int:
    """Where a report ends that is to have all until now."""
    if wanted.bucket == "1m" or "end_user" in wanted.group_by:
        # What finished in this very microsecond is part of it.
        return now_us + 1
    # Whole days are what the coarsest sums are of, and nothing has finished in what is left of today.
    return (now_us // DAY_US + 1) * DAY_US


async def report_response(
    services: AdminServices,
    name: str,
    wanted: Asked,
    answered: Answered,
    describe: Callable[[UsageRow], Document],
    columns: Sequence[str],
    more: Document,
) -> Response:
    """The report in the format that was asked for; `columns` are those of `describe` that make up a flat row."""
    rows = answered.rows
    flat = ("start_time", "end_time", *wanted.group_by, *columns)
    if answered.largest is not None:
        total = describe(answered.largest.total)
        more = {**more, "num_results": answered.largest.num_groups, "total": {name: total[name] for name in columns}}

    def encode() -> bytes:
        if wanted.format == "json":
            return msgspec.json.encode(
                {"object": "page", "data": _buckets(rows, describe), "has_more": False, "next_page": None, **more}
            )
        documents = ({**_times(row), **describe(row)} for row in rows)
        if wanted.format == "ndjson":
            return "".join(ndjson_line({name: item[name] for name in flat}) for item in documents).encode()
        return "".join((csv_line(flat), *csv_lines(documents, flat))).encode()

    # Thousands of rows take a while to spell out, for which no request waits.
    headers = {} if wanted.format == "json" else attachment(name, wanted.format)
    return Response(await services.call(encode), 200, headers, MEDIA_TYPES[wanted.format])


def attachment(name: str, extension: str) -> dict[str, str]:
    return {"content-disposition": f'attachment; filename="{name}.{extension}"'}


def groups_of(row: UsageRow, group_by: Iterable[str]) -> Document:
    return {name: getattr(row, name) for name in group_by}


def _buckets(rows: Sequence[UsageRow], describe: Callable[[UsageRow], Document]) -> list[Document]:
    return [
        {"object": "bucket", **_times(first), "results": [describe(first), *map(describe, rest)]}
        for first, *rest in (list(bucket) for _, bucket in groupby(rows, lambda row: (row.start_us, row.end_us)))
    ]


def _times(row: UsageRow) -> Document:
    return {"start_time": row.start_us // 1_000_000, "end_time": -(-row.end_us // 1_000_000)}
