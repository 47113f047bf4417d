"""The parameters of `/usage` and `/costs`, and the formats of their responses: JSON in buckets, CSV or NDJSON."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Literal

import msgspec
from fastapi import Depends, Query, Response

from loramux.admin.rest.access import Caller, tenant_filter
from loramux.admin.rest.held_response import HeldResponse
from loramux.admin.rest.listing import Document, TenantParam
from loramux.admin.rest.services import AdminServices
from loramux.migrations.database import Database
from loramux.platform.accounts.names import names_of
from loramux.platform.ledger.csv_lines import csv_line, csv_lines, ndjson_line
from loramux.platform.ledger.grains import DAY_US
from loramux.platform.ledger.query import GROUPS, UsageQuery
from loramux.platform.ledger.report import MAX_TOP, UsageRow, answer, largest

DEFAULT_RANGE_US = 30 * DAY_US
SENT_AT_ONCE_BYTES = 64 * 1024
"""Size of the parts in which a long report is sent, in bytes. A report of several parts occupies an export slot until
its client has read it.
"""

Time = Annotated[int | None, Query(ge=0, lt=2**40, description="Unix time in seconds.")]
Format = Literal["json", "csv", "ndjson"]
IDENTIFIERS = frozenset(("key", "adapter", "version"))
"""Groups whose values are identifiers. A column with the objects' names follows each."""
MEDIA_TYPES = {"json": "application/json", "csv": "text/csv; charset=utf-8", "ndjson": "application/x-ndjson"}


@dataclass(frozen=True, slots=True)
class Asked:
    """The query parameters of `/usage` and `/costs`."""

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
            description=f"Comma-separated: {', '.join(GROUPS)}.",
        ),
    ] = "tenant,model",
    timezone: Annotated[str, Query(max_length=64, description="Time zone for days, such as Europe/Berlin.")] = "UTC",
    top: Annotated[
        int | None,
        Query(ge=1, le=MAX_TOP, description="Report only this many of the largest groups; incompatible with bucket."),
    ] = None,
    format: Annotated[Format, Query()] = "json",  # noqa: A002 - the query parameter's name
) -> Asked:
    groups = tuple(name for name in group_by.split(",") if name)
    return Asked(tenant, start, end, bucket, groups, timezone, top, format)


Report = Annotated[Asked, Depends(asked)]


async def report_response(
    services: AdminServices,
    caller: Caller,
    name: str,
    wanted: Asked,
    describe: Callable[[UsageRow], Document],
    columns: Sequence[str],
    more: Document,
) -> Response:
    """Report on requests that finished in [start, end), by default in the last 30 days, in the requested format.

    `describe` returns a row's kind and amounts. `columns` are the amounts that CSV and NDJSON rows contain in addition
    to the interval and the groups. Raises InvalidRequest, Unavailable or ReadTooLong.
    """
    tenant_id = await tenant_filter(services, caller, wanted.tenant)
    query = _query(tenant_id, caller.adapter_ids, wanted, services.database.now_us())

    def spelled(rows: Sequence[UsageRow], more: Document) -> bytes:
        names = _names(services.database, rows, wanted.group_by, caller)

        def described(row: UsageRow) -> Document:
            amounts = describe(row)
            return {"object": amounts["object"], **_groups_of(row, wanted.group_by, names), **amounts}

        return _spelled(rows, wanted, described, columns, more)

    def make() -> bytes:
        if wanted.top is None:
            return spelled(answer(services.database, query), more)
        found = largest(services.database, query, wanted.top)
        total = describe(found.total)
        sums = {"num_results": found.num_groups, "total": {name: total[name] for name in columns}}
        return spelled(found.rows, {**more, **sums})

    # A report waits for a slot of its own. Meanwhile, the tenant's other calls can use this call's slot.
    caller.release_call_slot()
    body = await services.report(caller.principal, make)
    headers = {} if wanted.format == "json" else attachment(name, wanted.format)
    media_type = MEDIA_TYPES[wanted.format]
    if len(body) <= SENT_AT_ONCE_BYTES:
        return Response(body, 200, headers, media_type)
    # A slow client keeps a large body in memory, so the response holds a slot until it has been read.
    release_slot = await services.slots.exports.acquire_slot(caller.principal.holder)
    return HeldResponse(_in_parts(body), release_slot, headers, media_type)


def _query(tenant_id: str | None, adapter_ids: frozenset[str] | None, wanted: Asked, now_us: int) -> UsageQuery:
    end_us = _until_now(now_us, wanted) if wanted.end is None else wanted.end * 1_000_000
    return UsageQuery(
        tenant_id=tenant_id,
        start_us=max(0, end_us - DEFAULT_RANGE_US) if wanted.start is None else wanted.start * 1_000_000,
        end_us=end_us,
        bucket=wanted.bucket,
        group_by=wanted.group_by,
        timezone=wanted.timezone,
        adapter_ids=adapter_ids,
    )


def _until_now(now_us: int, wanted: Asked) -> int:
    if wanted.bucket == "1m" or "end_user" in wanted.group_by:
        # Include requests that finish in the current microsecond.
        return now_us + 1
    # Round up to the end of today, because the coarsest rollups cover whole days. This adds no requests, because none
    # finish in the future.
    return (now_us // DAY_US + 1) * DAY_US


def _spelled(
    rows: Sequence[UsageRow],
    wanted: Asked,
    describe: Callable[[UsageRow], Document],
    columns: Sequence[str],
    more: Document,
) -> bytes:
    if wanted.format == "json":
        return msgspec.json.encode(
            {"object": "page", "data": _buckets(rows, describe), "has_more": False, "next_page": None, **more}
        )
    flat = ("start_time", "end_time", *_columns(wanted.group_by), *columns)
    documents = ({**_times(row), **describe(row)} for row in rows)
    if wanted.format == "ndjson":
        return "".join(ndjson_line({name: item[name] for name in flat}) for item in documents).encode()
    return "".join((csv_line(flat), *csv_lines(documents, flat))).encode()


async def _in_parts(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), SENT_AT_ONCE_BYTES):
        yield body[start : start + SENT_AT_ONCE_BYTES]


def attachment(name: str, extension: str) -> dict[str, str]:
    return {"content-disposition": f'attachment; filename="{name}.{extension}"'}


def _groups_of(row: UsageRow, group_by: Iterable[str], names: Mapping[str, str]) -> Document:
    """Return a row's groups. Groups by identifier are followed by the object's name, such as `adapter_name`."""
    groups: Document = {}
    for name in group_by:
        groups[name] = value = getattr(row, name)
        if name in IDENTIFIERS:
            groups[f"{name}_name"] = None if value is None else names.get(value, value)
    return groups


def _columns(group_by: Iterable[str]) -> list[str]:
    return [column for name in group_by for column in ((name, f"{name}_name") if name in IDENTIFIERS else (name,))]


def _names(database: Database, rows: Iterable[UsageRow], group_by: Sequence[str], caller: Caller) -> Mapping[str, str]:
    ids = {getattr(row, name) for name in group_by if name in IDENTIFIERS for row in rows}
    return names_of(database, ids, caller.principal.tenant_id) if ids else {}


def _buckets(rows: Sequence[UsageRow], describe: Callable[[UsageRow], Document]) -> list[Document]:
    # Encode each result separately: encoding all in one call would block every other thread.
    return [
        {
            "object": "bucket",
            **_times(bucket[0]),
            "results": [msgspec.Raw(msgspec.json.encode(describe(row))) for row in bucket],
        }
        for bucket in (list(same) for _, same in groupby(rows, lambda row: (row.start_us, row.end_us)))
    ]


def _times(row: UsageRow) -> Document:
    return {"start_time": row.start_us // 1_000_000, "end_time": -(-row.end_us // 1_000_000)}
