"""Hourly and daily sums of the ledger, added up behind the settlements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Subquery,
    Table,
    delete,
    func,
    literal,
    select,
    union_all,
)
from sqlalchemy.dialects import postgresql, sqlite

from loramux.migrations import schema
from loramux.migrations.database import Database

HOUR_US, DAY_US = SPANS_US = (3_600_000_000, 86_400_000_000)
EVERYBODY = ""
"""The tenant of the series that sum all tenants."""

SERIES = ("tenant_id", "api_key_id", "adapter_id", "adapter_version_id", "model", "base", "endpoint", "status")
AMOUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")
_OF_EVERYBODY = ("base", "endpoint", "status")
"""What the series of all tenants keep apart."""

MAX_BATCHES = 64
"""How many transactions of settlements one fold takes: SQLite's only writer waits for it."""

_events, _adjustments, _batches = schema.usage_events, schema.usage_adjustments, schema.usage_batches
_series, _rollups = schema.usage_series, schema.usage_rollups


class UsageRollups:
    """Adds what was settled to the rollups, once.

    Settlements write one row into `usage_batches` in their own transaction, and touch no rollup: one hot tenant's
    requests of many gateways never wait for each other's sums. A fold takes such rows away and adds their events and
    adjustments in one transaction of its own. So an entry of the ledger is either in the rollups or in a batch that
    waits, in every state that a reader can see and after every crash, whatever the clocks of gateways say.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def fold(self, max_batches: int = MAX_BATCHES) -> int:
        """Add some of what waits, the oldest first; how many batches those were. Several gateways may call it."""
        waiting = select(_batches.c.id, _batches.c.at_us).order_by(_batches.c.at_us, _batches.c.id).limit(max_batches)
        with self._database.read() as connection:
            if connection.execute(select(_batches.c.id).limit(1)).first() is None:
                # An idle gateway takes no writer's lock.
                return 0
        with self._database.write() as connection:
            # Another gateway's fold keeps those that it holds; none waits for the other.
            rows = connection.execute(waiting.with_for_update(skip_locked=True)).all()
            if rows:
                ids = [row.id for row in rows]
                facts = _facts(ids, sorted({row.at_us for row in rows}))
                _add(connection, facts, SERIES)
                _add(connection, facts, _OF_EVERYBODY)
                connection.execute(delete(_batches).where(_batches.c.id.in_(ids)))
        return len(rows)

    def fold_all(self) -> int:
        """Fold until nothing waits; how many batches there were."""
        total = 0
        while folded := self.fold():
            total += folded
        return total


def _facts(batch_ids: Sequence[int], times_us: Sequence[int]) -> Subquery:
    """The entries of some batches, with what their series are made of."""
    events = select(_events.c.finished_us.label("at_us"), *_series_columns(), literal(1).label("requests"))
    events = events.add_columns(*(_events.c[name] for name in AMOUNTS[1:]))
    # The times are what an index finds; the batch is what decides.
    events = events.where(_events.c.finished_us.in_(times_us), _events.c.batch_id.in_(batch_ids))
    adjustments = select(_adjustments.c.created_us, *_series_columns(), literal(0))
    adjustments = adjustments.add_columns(*(_adjustments.c[name] for name in AMOUNTS[1:])).select_from(
        _adjustments.join(_events, _events.c.request_id == _adjustments.c.request_id)
    )
    adjustments = adjustments.where(_adjustments.c.created_us.in_(times_us), _adjustments.c.batch_id.in_(batch_ids))
    return union_all(events, adjustments).subquery("facts")


def _series_columns() -> list[ColumnElement[Any]]:
    return [func.coalesce(_events.c[name], "").label(name) for name in SERIES]


def _add(connection: Connection, facts: Subquery, kept: Sequence[str]) -> None:
    """Add facts to the series that keep so much of them apart, by hour and by day."""
    parts = [(facts.c[name] if name in kept else literal("")).label(name) for name in SERIES]
    # In one order everywhere, so that two folds never wait for each other in a circle.
    missing = select(*parts).distinct().order_by(*SERIES)
    connection.execute(
        _insert(connection, _series).from_select(list(SERIES), missing).on_conflict_do_nothing(index_elements=SERIES)
    )
    same = [_series.c[name] == (facts.c[name] if name in kept else "") for name in SERIES]
    for span_us in SPANS_US:
        start_us = (facts.c.at_us - facts.c.at_us % span_us).label("start_us")
        sums: Select[Any] = (
            select(
                literal(span_us).label("span_us"),
                start_us,
                _series.c.tenant_id,
                _series.c.id.label("series_id"),
                *(func.sum(facts.c[name]).label(name) for name in AMOUNTS),
            )
            .join_from(facts, _series, _all(same))
            .group_by(start_us, _series.c.tenant_id, _series.c.id)
            .order_by(start_us, _series.c.tenant_id, _series.c.id)
        )
        names = [column.name for column in _rollups.c]
        added = _insert(connection, _rollups).from_select(names, sums)
        connection.execute(
            added.on_conflict_do_update(
                index_elements=[column.name for column in _rollups.primary_key],
                set_={name: _rollups.c[name] + added.excluded[name] for name in AMOUNTS},
            )
        )


def _insert(connection: Connection, table: Table) -> Any:
    """Both databases insert or update with one statement, and SQLAlchemy spells it for each apart."""
    return (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)


def _all(conditions: Sequence[ColumnElement[bool]]) -> ColumnElement[bool]:
    first, *rest = conditions
    for condition in rest:
        first = first & condition
    return first
