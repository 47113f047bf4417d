"""The counters that one transaction works with: locked in one order, kept in memory, written once."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import psycopg
from sqlalchemy import (
    Connection,
    Select,
    and_,
    select,
    tuple_,
)
from sqlalchemy.dialects import postgresql, sqlite

from loramux.migrations import schema
from loramux.migrations.bulk_rows import POSTGRESQL, ROWS, BulkStatement, document, rows_of, text_of, write_together
from loramux.migrations.pipeline import Run, pipeline
from loramux.platform.quotas.counters import Counter, CounterKey
from loramux.platform.quotas.policy_cache import among
from loramux.platform.quotas.rules import Binding

_policies, _counters = schema.quota_policies, schema.quota_counters
_KEY = (_counters.c.policy_id, _counters.c.subject_id, _counters.c.window_start_us)
_AMOUNTS = (
    _counters.c.level,
    _counters.c.reserved,
    _counters.c.used,
    _counters.c.exceeded,
    _counters.c.refilled_us,
)
_WRITE = BulkStatement.update(_counters, _KEY, _AMOUNTS)


@functools.cache
def _locking(is_locking: bool) -> Select[*tuple[Any, ...]]:
    """On PostgreSQL: the counters of the keys that are the document's rows."""
    keys = rows_of(_KEY)
    counters = select(_counters).join(keys, and_(*(column == keys.c[column.name] for column in _KEY)))
    return counters.order_by(*_KEY).with_for_update(of=_counters) if is_locking else counters


class CounterRows:
    """How far everything is counted.

    Whoever changes a counter locks it first, all that it wants in the order of their keys, so that no two wait for
    each other in a circle. What was read under the locks is therefore still true when it is written. `is_locking`
    False reads for a look only.
    """

    def __init__(self, connection: Connection, is_locking: bool = True) -> None:
        self._connection = connection
        self._is_locking = is_locking
        self.counters: dict[CounterKey, Counter] = {}
        self._changed: set[CounterKey] = set()

    def read(self, keys: Collection[CounterKey]) -> None:
        """Read, and lock, those of these counters that there are."""
        if not keys:
            return
        if self._connection.dialect.name == POSTGRESQL:
            with pipeline(self._connection) as run:
                found = self.ask(run, keys)
            self.take(found.fetchall())
        else:
            self.take(self._connection.execute(select(_counters).where(tuple_(*_KEY).in_(sorted(keys)))).all())

    def ask(self, run: Run, keys: Collection[CounterKey]) -> psycopg.Cursor[Any]:
        """Ask for these counters in a round trip; `take` takes the rows that come back."""
        text = text_of(_locking(self._is_locking), self._connection.dialect)
        return run(text, {ROWS: document([_named(key) for key in keys])})

    def take(self, rows: Iterable[Sequence[Any]]) -> None:
        for row in rows:
            self.counters[CounterKey(row[0], row[1], row[2])] = Counter(*row[3:])

    def make(self, bindings: Iterable[Binding]) -> None:
        """Make those of these counters that are missing, for policies that there are; before any is locked."""
        wanted = {binding.key: binding for binding in bindings}
        ids = sorted({key.policy_id for key in wanted})
        query = select(_policies.c.id).where(among(self._connection.dialect.name, _policies.c.id, ids))
        # Held, so that nobody deletes a policy whose counter is being made.
        held = query.order_by(_policies.c.id).with_for_update(read=True, key_share=True)
        there = set(self._connection.execute(held).scalars())
        rows = [
            _row_of(key, Counter.fresh(wanted[key].policy.burst, 0)) for key in sorted(wanted) if key.policy_id in there
        ]
        if rows:
            dialect = postgresql if self._connection.dialect.name == POSTGRESQL else sqlite
            # Another gateway may make the same ones: in one order, so that none waits for another in a circle.
            self._connection.execute(dialect.insert(_counters).on_conflict_do_nothing(), rows)

    def change(self, key: CounterKey, counter: Counter) -> None:
        self.counters[key] = counter
        self._changed.add(key)

    def writes(self) -> tuple[BulkStatement, list[dict[str, Any]]]:
        """What writes that which was changed."""
        return _WRITE, [_row_of(key, self.counters[key]) for key in self._changed]

    def write(self) -> None:
        """Write what was changed."""
        write_together(self._connection, [self.writes()])


def _named(key: CounterKey) -> dict[str, Any]:
    return {"policy_id": key.policy_id, "subject_id": key.subject_id, "window_start_us": key.window_start_us}


def _row_of(key: CounterKey, counter: Counter) -> dict[str, Any]:
    return {
        "policy_id": key.policy_id,
        "subject_id": key.subject_id,
        "window_start_us": key.window_start_us,
        "level": counter.level,
        "reserved": counter.reserved,
        "used": counter.used,
        "exceeded": counter.exceeded,
        "refilled_us": counter.refilled_us,
    }
