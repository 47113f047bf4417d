"""One transaction's counters, which are locked in a fixed order, changed in memory, and written once."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
import psycopg
from sqlalchemy import Connection, Select, and_, select, tuple_
from sqlalchemy.dialects import postgresql, sqlite

from loramux.migrations import schema
from loramux.migrations.bulk_rows import (
    POSTGRESQL,
    ROWS,
    BulkStatement,
    Write,
    document,
    rows_of,
    text_of,
    write_together,
)
from loramux.migrations.database import Database, Moment
from loramux.migrations.pipeline import Run, pipeline
from loramux.platform.quotas.counters import Counter, CounterKey
from loramux.platform.quotas.policy_cache import among
from loramux.platform.quotas.rules import Binding

_policies, _counters = schema.quota_policies, schema.quota_counters
_KEY = tuple(_counters.c[name] for name in CounterKey._fields)
_AMOUNTS = tuple(_counters.c[name] for name in Counter._fields)


class _KeyRow(msgspec.Struct, frozen=True, gc=False):
    policy_id: str
    subject_id: str
    window_start_us: int


class _CounterRow(_KeyRow, frozen=True, gc=False):
    level: int
    reserved: int
    used: int
    exceeded: int
    refilled_us: int


_WRITE = BulkStatement.update(_counters, _CounterRow, _KEY, _AMOUNTS)


@functools.cache
def _locking(is_locking: bool) -> Select[*tuple[Any, ...]]:
    """Select counters by their keys, which are the rows of a JSON document (PostgreSQL only)."""
    keys = rows_of(_KEY)
    counters = select(*_KEY, *_AMOUNTS).join(keys, and_(*(column == keys.c[column.name] for column in _KEY)))
    return counters.order_by(*_KEY).with_for_update(of=_counters) if is_locking else counters


class CounterRows:
    """Counters by key. If `is_locking` is False, counters are only read.

    A transaction locks all counters that it will change before it changes any of them, in the order of their keys. Two
    transactions therefore never deadlock, and values read under the locks stay current until they are written.
    """

    def __init__(self, connection: Connection, is_locking: bool = True) -> None:
        self._connection = connection
        self._is_locking = is_locking
        self.counters: dict[CounterKey, Counter] = {}
        self._changed: set[CounterKey] = set()

    def read(self, keys: Collection[CounterKey]) -> None:
        """Read the counters that exist, and lock them if `is_locking`."""
        if not keys:
            return
        if self._connection.dialect.name == POSTGRESQL:
            with pipeline(self._connection) as run:
                found = self._ask(run, keys)
            self._take(found.fetchall())
        else:
            rows = select(*_KEY, *_AMOUNTS).where(tuple_(*_KEY).in_(sorted(keys)))
            self._take(self._connection.execute(rows).all())

    def read_at(self, keys: Collection[CounterKey], database: Database) -> Moment:
        """Lock the counters, then read the time in a separate statement, which sees all changes committed so far."""
        if self._connection.dialect.name != POSTGRESQL:
            self.read(keys)
            return database.moment(self._connection)
        with pipeline(self._connection) as run:
            counters = self._ask(run, keys) if keys else None
            moment = run(database.moment_text)
        if counters is not None:
            self._take(counters.fetchall())
        return database.moment_of(moment.fetchall()[0])

    def _ask(self, run: Run, keys: Collection[CounterKey]) -> psycopg.Cursor[Any]:
        """Send the query for these counters. `_take` stores the resulting rows."""
        text = text_of(_locking(self._is_locking), self._connection.dialect)
        return run(text, {ROWS: document([_KeyRow(*key) for key in keys])})

    def _take(self, rows: Iterable[Sequence[Any]]) -> None:
        for policy_id, subject_id, window_start_us, *amounts in rows:
            self.counters[CounterKey(policy_id, subject_id, window_start_us)] = Counter(*amounts)

    def make(self, bindings: Iterable[Binding]) -> None:
        """Create the missing counters of existing policies. Call it before any counter is locked."""
        wanted = {binding.key: binding for binding in bindings}
        ids = sorted({key.policy_id for key in wanted})
        query = select(_policies.c.id).where(among(self._connection.dialect.name, _policies.c.id, ids))
        # The lock keeps a policy from being deleted while its counter is created.
        held = query.order_by(_policies.c.id).with_for_update(read=True, key_share=True)
        there = set(self._connection.execute(held).scalars())
        rows = [
            key._asdict() | Counter.fresh(wanted[key].policy.burst, 0)._asdict()
            for key in sorted(wanted)
            if key.policy_id in there
        ]
        if rows:
            dialect = postgresql if self._connection.dialect.name == POSTGRESQL else sqlite
            # Other gateways may insert the same rows. All gateways use the same order, so they never deadlock.
            self._connection.execute(dialect.insert(_counters).on_conflict_do_nothing(), rows)

    def change(self, key: CounterKey, counter: Counter) -> None:
        self.counters[key] = counter
        self._changed.add(key)

    def writes(self) -> Write:
        """Return the statement that writes all changed counters, and its rows."""
        return _WRITE, [_CounterRow(*key, *self.counters[key]) for key in self._changed]

    def write(self) -> None:
        write_together(self._connection, [self.writes()])
