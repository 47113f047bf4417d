"""The ledger: what was used, as events and as sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, CompoundSelect, Row, Select, func, literal, select, union_all

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.migrations.paging import Page, keyset_rows
from loramux.platform.errors import InvalidRequest

BUCKET_US = {"1m": 60_000_000, "1h": 3_600_000_000, "1d": 86_400_000_000}
GROUPS = ("tenant", "key", "adapter", "version", "model", "endpoint", "status")
AMOUNTS = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")
MAX_BUCKETS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """Sums over `[start_us, end_us)`; a field that was not grouped by is None."""

    start_us: int
    end_us: int
    tenant: str | None = None
    key: str | None = None
    adapter: str | None = None
    version: str | None = None
    model: str | None = None
    endpoint: str | None = None
    status: str | None = None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_nanos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageEvent:
    """One settled request, adjusted where it was recovered first. `tenant` is the slug."""

    request_id: str
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
    started_us: int
    finished_us: int
    first_token_us: int | None
    base: str
    end_user: str | None
    cost_nanos: int
    price_id: str | None


class Ledger:
    """Reads usage events; only Admission writes them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def report(
        self,
        tenant_id: str | None,
        start_us: int,
        end_us: int,
        bucket: str | None = None,
        group_by: Sequence[str] = (),
    ) -> tuple[UsageRow, ...]:
        """Sums of what finished in `[start_us, end_us)`, oldest bucket first, then by the groups' values.

        An adjustment counts when it was written, with its request's groups and no request of its own.

        `tenant_id` None is all tenants; `bucket` is `1m`, `1h`, `1d` or None for the whole range. Buckets start at
        multiples of their length in UTC and are cut to the range. Raises InvalidRequest that names the field.
        """
        _check(start_us, end_us, bucket, group_by)
        facts = _facts(tenant_id, start_us, end_us, group_by).subquery()
        columns: list[ColumnElement[Any]] = [facts.c[name] for name in group_by]
        if bucket is not None:
            columns.insert(0, (facts.c.at_us - facts.c.at_us % BUCKET_US[bucket]).label("bucket_us"))
        sums = [func.coalesce(func.sum(facts.c[name]), 0).label(name) for name in ("requests", *AMOUNTS)]
        query: Select[Any] = select(*columns, *sums)
        if columns:
            labels = [column.name for column in columns]
            query = query.group_by(*labels).order_by(*labels)
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        return tuple(_usage_row(row, start_us, end_us, bucket, group_by) for row in rows)

    def events(
        self,
        tenant_id: str | None,
        limit: int,
        after: str | None = None,
        before: str | None = None,
        start_us: int | None = None,
        end_us: int | None = None,
    ) -> Page[UsageEvent]:
        """Settled requests with their adjustments, those that started last first; all tenants when it is None."""
        events, tenants, adjustments = schema.usage_events, schema.tenants, schema.usage_adjustments
        rest = [column for column in events.c if column.name not in AMOUNTS]
        amounts = [(events.c[name] + func.coalesce(adjustments.c[name], 0)).label(name) for name in AMOUNTS]
        adjusted = events.join(tenants, tenants.c.id == events.c.tenant_id).outerjoin(
            adjustments, adjustments.c.request_id == events.c.request_id
        )
        query = select(*rest, *amounts, tenants.c.slug).select_from(adjusted)
        if tenant_id is not None:
            query = query.where(events.c.tenant_id == tenant_id)
        if start_us is not None:
            query = query.where(events.c.finished_us >= start_us)
        if end_us is not None:
            query = query.where(events.c.finished_us < end_us)
        with self._database.read() as connection:
            rows, has_more = keyset_rows(connection, query, events.c.request_id, limit, after, before)
        return Page(tuple(_event(row) for row in rows), has_more)


def _facts(
    tenant_id: str | None, start_us: int, end_us: int, group_by: Sequence[str]
) -> CompoundSelect[*tuple[Any, ...]]:
    """Events and adjustments alike: when, the groups' values, how many requests and tokens."""
    events, tenants, adjustments = schema.usage_events, schema.tenants, schema.usage_adjustments
    of_tenant = events.join(tenants, tenants.c.id == events.c.tenant_id)
    of_event = of_tenant.join(adjustments, adjustments.c.request_id == events.c.request_id)
    groups = [_group_column(name).label(name) for name in group_by]
    parts = []
    for table, time, tables, num_requests in (
        (events, events.c.finished_us, of_tenant, 1),
        (adjustments, adjustments.c.created_us, of_event, 0),
    ):
        query = (
            select(
                time.label("at_us"),
                *groups,
                literal(num_requests).label("requests"),
                *(table.c[name] for name in AMOUNTS),
            )
            .select_from(tables)
            .where(time >= start_us, time < end_us)
        )
        parts.append(query if tenant_id is None else query.where(table.c.tenant_id == tenant_id))
    return union_all(*parts)


def _group_column(name: str) -> ColumnElement[Any]:
    events = schema.usage_events.c
    columns: dict[str, ColumnElement[Any]] = {
        "tenant": schema.tenants.c.slug,
        "key": events.api_key_id,
        "adapter": events.adapter_id,
        "version": events.adapter_version_id,
        "model": events.model,
        "endpoint": events.endpoint,
        "status": events.status,
    }
    return columns[name]


def _check(start_us: int, end_us: int, bucket: str | None, group_by: Sequence[str]) -> None:
    if not 0 <= start_us < 2**62:
        raise InvalidRequest("start is not a time after 1970", param="start")
    if not start_us < end_us < 2**62:
        raise InvalidRequest("end must lie after start", param="end")
    if bucket is not None and bucket not in BUCKET_US:
        raise InvalidRequest(f"buckets are {', '.join(BUCKET_US)}", param="bucket")
    if bucket is not None and (end_us - start_us) // BUCKET_US[bucket] > MAX_BUCKETS:
        raise InvalidRequest(f"the range holds more than {MAX_BUCKETS} buckets of {bucket}", param="bucket")
    unknown = [name for name in group_by if name not in GROUPS]
    if unknown or len(set(group_by)) != len(group_by):
        raise InvalidRequest(f"groups are {', '.join(GROUPS)}, each at most once", param="group_by")


def _usage_row(row: Row[Any], start_us: int, end_us: int, bucket: str | None, group_by: Sequence[str]) -> UsageRow:
    if bucket is not None:
        bucket_us = int(row.bucket_us)
        start_us, end_us = max(start_us, bucket_us), min(end_us, bucket_us + BUCKET_US[bucket])
    return UsageRow(
        start_us=start_us,
        end_us=end_us,
        **{name: getattr(row, name) for name in group_by},
        requests=int(row.requests),
        prompt_tokens=int(row.prompt_tokens),
        cached_tokens=int(row.cached_tokens),
        completion_tokens=int(row.completion_tokens),
        cost_nanos=int(row.cost_nanos),
    )


def _event(row: Row[Any]) -> UsageEvent:
    return UsageEvent(
        request_id=row.request_id,
        tenant_id=row.tenant_id,
        tenant=row.slug,
        api_key_id=row.api_key_id,
        adapter_id=row.adapter_id,
        adapter_version_id=row.adapter_version_id,
        model=row.model,
        endpoint=row.endpoint,
        status=row.status,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        completion_tokens=row.completion_tokens,
        started_us=row.started_us,
        finished_us=row.finished_us,
        first_token_us=row.first_token_us,
        base=row.base,
        end_user=row.end_user,
        cost_nanos=row.cost_nanos,
        price_id=row.price_id,
    )
