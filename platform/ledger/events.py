"""Reads the usage ledger, as individual events and as sums."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import Row, Select, func, select, tuple_

from loramux.migrations import schema
from loramux.migrations.database import LONGEST_READ_S, Database
from loramux.migrations.paging import Page, keyset_page
from loramux.platform.ledger.grains import AMOUNTS
from loramux.platform.ledger.query import UsageQuery
from loramux.platform.ledger.report import UsageRow, answer

_AMOUNTS = AMOUNTS[1:]
EXPORT_ROWS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageEvent:
    """One settled request. If its actual usage arrived after a recovery, the amounts include the adjustment. `tenant`
    is the slug.
    """

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
    service_tier: str
    cost_nanos: int
    price_id: str | None


class Ledger:
    """Reads usage events, which only Admission writes."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def report(
        self,
        tenant_id: str | None,
        start_us: int,
        end_us: int,
        bucket: str | None = None,
        group_by: Sequence[str] = (),
        timezone: str = "UTC",
    ) -> tuple[UsageRow, ...]:
        """Sum the requests that finished in `[start_us, end_us)`. Raises InvalidRequest or ReadTooLong."""
        return answer(
            self._database,
            UsageQuery(
                tenant_id=tenant_id,
                start_us=start_us,
                end_us=end_us,
                bucket=bucket,
                group_by=tuple(group_by),
                timezone=timezone,
            ),
        )

    def events(
        self,
        tenant_id: str | None,
        limit: int,
        after: str | None = None,
        before: str | None = None,
        start_us: int | None = None,
        end_us: int | None = None,
        only: Collection[str] | None = None,
    ) -> Page[UsageEvent]:
        """List settled requests with their adjustments, newest first.

        Lists all tenants' requests if `tenant_id` is None. `only` restricts the list to requests for these adapters.
        """
        query = _select_events(tenant_id, start_us, end_us, only)
        with self._database.read(LONGEST_READ_S) as connection:
            return keyset_page(connection, query, schema.usage_events.c.request_id, _event, limit, after, before)

    def export(
        self,
        tenant_id: str | None,
        start_us: int,
        end_us: int,
        after: UsageEvent | None = None,
        only: Collection[str] | None = None,
    ) -> Sequence[UsageEvent]:
        """Return the next chunk of an export: up to EXPORT_ROWS events, in the order in which their requests finished.

        Each chunk is read in its own transaction, so that a slow client does not keep a transaction open.
        """
        events = schema.usage_events.c
        query = _select_events(tenant_id, start_us, end_us, only)
        if after is not None:
            place = (after.finished_us, after.request_id)
            # The first condition is redundant, but only it can use an index.
            query = query.where(
                events.finished_us >= after.finished_us, tuple_(events.finished_us, events.request_id) > place
            )
        query = query.order_by(events.finished_us, events.request_id).limit(EXPORT_ROWS)
        with self._database.read(LONGEST_READ_S) as connection:
            return [_event(row) for row in connection.execute(query)]


def _select_events(
    tenant_id: str | None, start_us: int | None, end_us: int | None, only: Collection[str] | None
) -> Select[Any]:
    events, tenants, adjustments = schema.usage_events, schema.tenants, schema.usage_adjustments
    names = {field.name for field in fields(UsageEvent)}.difference(_AMOUNTS)
    rest = [column for column in events.c if column.name in names]
    amounts = [(events.c[name] + func.coalesce(adjustments.c[name], 0)).label(name) for name in _AMOUNTS]
    # Every event has a tenant, but an outer join makes the planner scan the events instead of starting from the few
    # tenants.
    adjusted = events.outerjoin(tenants, tenants.c.id == events.c.tenant_id).outerjoin(
        adjustments, adjustments.c.request_id == events.c.request_id
    )
    query: Select[Any] = select(*rest, *amounts, tenants.c.slug.label("tenant")).select_from(adjusted)
    if tenant_id is not None:
        query = query.where(events.c.tenant_id == tenant_id)
    if only is not None:
        query = query.where(events.c.adapter_id.in_(only))
    if start_us is not None:
        query = query.where(events.c.finished_us >= start_us)
    if end_us is not None:
        query = query.where(events.c.finished_us < end_us)
    return query


def _event(row: Row[Any]) -> UsageEvent:
    return UsageEvent(**row._mapping)
