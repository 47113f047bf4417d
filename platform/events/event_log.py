"""The events in the database, numbered in the order in which servers see them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Column, Connection, Row, Select, bindparam, delete, func, select, update

from loramux.migrations.database import LONGEST_READ_S, Database
from loramux.migrations.paging import Page, keyset_page
from loramux.migrations.schema import adapters, event_heads, events, tenants
from loramux.migrations.upserts import upsert

ALL = "all"
"""The row of `event_heads` for the position among all events."""
NUMBERED_AT_ONCE = 1000
SWEPT_AT_ONCE = 1000
MAX_READ = 200
"""Largest number of events that one read returns."""

MAX_KEPT = 100_000
"""Largest number of events of a tenant that a sweep leaves."""

_DAY_US = 86_400_000_000
_NUMBER = (
    update(events)
    .where(events.c.id == bindparam("event_id"))
    .values(position=bindparam("new_position"), sequence=bindparam("new_sequence"))
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """`sequence` numbers the events of a tenant without gaps. `position` numbers all events. `tenant` and `model` are
    the names of the tenant and the adapter, or None for objects that no longer exist.
    """

    id: str
    type: str
    position: int
    sequence: int
    created_us: int
    tenant_id: str
    tenant: str | None
    adapter_id: str | None
    model: str | None
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventFilter:
    """Which events a reader wants. None means no filter."""

    tenant_id: str | None = None
    adapter_ids: Collection[str] | None = None
    types: Collection[str] | None = None


class EventLog:
    """Numbers and reads events. Blocking. Several servers can use one database.

    Transactions commit in another order than they begin. Events are therefore numbered afterwards, under the lock of
    one row: a reader that has seen a number never misses an event with a lower one.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def advance(self) -> int:
        """Number the new events, and return the highest position."""
        with self._database.read() as connection:
            unnumbered = select(events.c.id).where(events.c.position.is_(None)).limit(1)
            if connection.execute(unnumbered).first() is None:
                return _head(connection, ALL)
        with self._database.write() as connection:
            return self._number(connection)

    def changed(self, after: int) -> Collection[str]:
        """Return the tenants that have events after a position."""
        query = select(events.c.tenant_id).where(events.c.position > after).distinct()
        with self._database.read() as connection:
            return connection.scalars(query).all()

    def head(self, tenant_id: str | None) -> int:
        """Return the highest sequence number of a tenant, or the highest position of all events."""
        with self._database.read() as connection:
            return _head(connection, tenant_id or ALL)

    def oldest(self, tenant_id: str | None) -> int | None:
        """Return the lowest sequence number of a tenant, or the lowest position, that is still kept."""
        number = events.c.position if tenant_id is None else events.c.sequence
        query = select(func.min(number))
        with self._database.read() as connection:
            oldest: int | None = connection.scalar(
                query if tenant_id is None else query.where(events.c.tenant_id == tenant_id)
            )
        return oldest

    def read(self, after: int, wanted: EventFilter, since_us: int = 0, limit: int = MAX_READ) -> list[Event]:
        """Return the oldest events after a number: a sequence number if a tenant is wanted, otherwise a position."""
        number = _number_column(wanted)
        query = _selected(wanted).where(number > after)
        if since_us:
            query = query.where(events.c.created_us >= since_us)
        with self._database.read() as connection:
            rows: list[Row[Any]] = list(connection.execute(query.order_by(number).limit(limit)))
        return [_event(row) for row in rows]

    def page(self, wanted: EventFilter, limit: int, after: str | None = None, before: str | None = None) -> Page[Event]:
        """Return a page of the numbered events, newest first. `after` and `before` are identifiers. An event that is no
        longer kept counts as older than all others.
        """
        number = _number_column(wanted)
        query = _selected(wanted).where(events.c.position.is_not(None))
        edges = [one for one in (after, before) if one is not None]
        with self._database.read(LONGEST_READ_S) as connection:
            known = select(events.c.id, number).where(events.c.id.in_(edges))
            if wanted.tenant_id is not None:
                known = known.where(events.c.tenant_id == wanted.tenant_id)
            numbers: dict[str, int] = {row[0]: row[1] or 0 for row in connection.execute(known)} if edges else {}
            first, last = (None if one is None else numbers.get(one, 0) for one in (after, before))
            return keyset_page(connection, query, number, _event, limit, first, last)

    def sweep(self, kept_days: int, max_kept: int = MAX_KEPT) -> int:
        """Delete the events that are older than this many days, and each tenant's oldest events beyond a number of
        them. Return the number of deleted events.
        """
        is_old = events.c.created_us < self._database.now_us() - kept_days * _DAY_US
        # Numbers have no gaps, so nothing needs to be counted.
        is_beyond = events.c.sequence <= event_heads.c.number - max_kept
        numbered = select(events.c.id).where(events.c.position.is_not(None))
        of_tenants = numbered.join(event_heads, event_heads.c.tenant_id == events.c.tenant_id)
        return self._delete(numbered.where(is_old)) + self._delete(of_tenants.where(is_beyond))

    def _delete(self, condemned: Select[tuple[str]]) -> int:
        """Delete events, some at a time, and return their number."""
        total = 0
        while True:
            with self._database.write() as connection:
                some = condemned.limit(SWEPT_AT_ONCE).with_for_update(of=events, skip_locked=True)
                num_swept = connection.execute(delete(events).where(events.c.id.in_(some))).rowcount
            total += num_swept
            if num_swept < SWEPT_AT_ONCE:
                return total

    def _number(self, connection: Connection) -> int:
        heads = event_heads.c
        # The insert waits for another server that creates the row at the same time.
        first = upsert(connection, event_heads).values(tenant_id=ALL, number=0).on_conflict_do_nothing()
        connection.execute(first)
        position: int = connection.scalars(select(heads.number).where(heads.tenant_id == ALL).with_for_update()).one()
        new = connection.execute(
            select(events.c.id, events.c.tenant_id)
            .where(events.c.position.is_(None))
            .order_by(events.c.id)
            .limit(NUMBERED_AT_ONCE)
        ).all()
        if not new:
            return position
        owners = {row.tenant_id for row in new}
        known = select(heads.tenant_id, heads.number).where(heads.tenant_id.in_(owners))
        numbers = Counter({row.tenant_id: row.number for row in connection.execute(known)})
        rows = []
        for row in new:
            position += 1
            numbers[row.tenant_id] += 1
            rows.append({"event_id": row.id, "new_position": position, "new_sequence": numbers[row.tenant_id]})
        connection.execute(_NUMBER, rows)
        insert = upsert(connection, event_heads)
        changed = insert.on_conflict_do_update(index_elements=["tenant_id"], set_={"number": insert.excluded.number})
        connection.execute(changed, [{"tenant_id": one, "number": numbers[one]} for one in sorted(owners)])
        connection.execute(changed, [{"tenant_id": ALL, "number": position}])
        return position


def _head(connection: Connection, tenant_id: str) -> int:
    query = select(event_heads.c.number).where(event_heads.c.tenant_id == tenant_id)
    return int(connection.scalar(query) or 0)


def _number_column(wanted: EventFilter) -> Column[Any]:
    """The column that orders the wanted events."""
    return events.c.position if wanted.tenant_id is None else events.c.sequence


def _selected(wanted: EventFilter) -> Select[tuple[Any, ...]]:
    owners = tenants.alias()
    query = (
        select(*events.c, tenants.c.slug.label("tenant"), (owners.c.slug + "/" + adapters.c.name).label("model"))
        .outerjoin(tenants, tenants.c.id == events.c.tenant_id)
        .outerjoin(adapters, adapters.c.id == events.c.adapter_id)
        .outerjoin(owners, owners.c.id == adapters.c.tenant_id)
    )
    if wanted.tenant_id is not None:
        query = query.where(events.c.tenant_id == wanted.tenant_id)
    if wanted.adapter_ids is not None:
        query = query.where(events.c.adapter_id.in_(sorted(wanted.adapter_ids)))
    if wanted.types is not None:
        query = query.where(events.c.type.in_(sorted(wanted.types)))
    return query


def _event(row: Row[Any]) -> Event:
    return Event(**row._mapping)
