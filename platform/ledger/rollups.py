"""Sums of the ledger over spans from a minute to sixteen days, updated in the background."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    CompoundSelect,
    Connection,
    bindparam,
    cast,
    delete,
    func,
    literal,
    select,
    union_all,
)
from sqlalchemy.dialects.postgresql import ARRAY

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.migrations.schema import SERIES
from loramux.migrations.upserts import upsert
from loramux.platform.ledger.grains import AMOUNTS, GRAINS, MINUTE_US, Grain
from loramux.platform.ledger.series import TENANT, SeriesKey, SeriesNumbers

MAX_BATCHES = 64
"""Maximum number of batches that a fold adds to the rollups. On SQLite, a fold blocks all other writers."""


class _Fact(NamedTuple):
    at_us: int
    series: SeriesKey
    amounts: tuple[int, ...]


class _RollupRow(NamedTuple):
    """A row of `usage_rollups`, or an increment to a row. The last fields are the amounts named in AMOUNTS."""

    grain: int
    span_us: int
    start_us: int
    tenant_id: str
    series_id: int
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_nanos: int


Sums = dict[tuple[int, SeriesKey], list[int]]
"""Amounts by span start and series."""

_events, _adjustments, _batches = schema.usage_events, schema.usage_adjustments, schema.usage_batches
_rollups = schema.usage_rollups


class UsageRollups:
    """Adds every settlement to the rollups exactly once.

    A settling transaction writes one row into `usage_batches` and touches no rollup, so gateways never contend for the
    sums of a busy tenant. A fold is a separate transaction that deletes these rows and adds their events and
    adjustments to the rollups. Readers therefore see each ledger entry either in the rollups or in a waiting batch,
    even after a crash and regardless of the gateways' clocks.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._numbers = SeriesNumbers()

    def fold(self, max_batches: int = MAX_BATCHES) -> int:
        """Add waiting batches to the rollups, oldest first, and return the number of batches. Several gateways can fold
        concurrently.
        """
        waiting = select(_batches.c.id, _batches.c.at_us).order_by(_batches.c.at_us, _batches.c.id).limit(max_batches)
        with self._database.read() as connection:
            if connection.execute(select(_batches.c.id).limit(1)).first() is None:
                # If there is nothing to fold, do not take the write lock.
                return 0
        numbers: Mapping[SeriesKey, int] = {}
        with self._database.write() as connection:
            # Batches that another gateway's fold has locked are skipped, so that folds never wait for each other.
            rows = connection.execute(waiting.with_for_update(skip_locked=True)).all()
            if rows:
                ids = [row.id for row in rows]
                numbers = self._add(connection, _sums(_read(connection, ids, {row.at_us for row in rows})))
                connection.execute(delete(_batches).where(_batches.c.id.in_(ids)))
        self._numbers.remember(numbers)
        return len(rows)

    def fold_all(self) -> int:
        total = 0
        while folded := self.fold():
            total += folded
        return total

    def _add(self, connection: Connection, sums: Sums) -> Mapping[SeriesKey, int]:
        """Add sums to the rows of every grain and span. Return the numbers of their series."""
        by_grain = {grain: _by_spans(sums, grain) for grain in GRAINS}
        keys = {key for by_span in by_grain.values() for _, key in by_span[min(by_span)]}
        numbers = self._numbers.find(connection, keys)
        rows = [
            _RollupRow(grain.number, span_us, start_us, key[TENANT], numbers[key], *amounts)
            for grain, by_span in by_grain.items()
            for span_us, spans in by_span.items()
            for (start_us, key), amounts in spans.items()
        ]
        # Write rows in a fixed order, so that two folds never deadlock.
        if rows:
            _upsert(connection, sorted(rows))
        return numbers


def _read(connection: Connection, batch_ids: Sequence[int], times_us: Iterable[int]) -> Iterator[_Fact]:
    for at_us, *values in connection.execute(_select_facts(batch_ids, times_us)):
        yield _Fact(at_us, tuple(values[: len(SERIES)]), tuple(values[len(SERIES) :]))


def _select_facts(batch_ids: Sequence[int], times_us: Iterable[int]) -> CompoundSelect[Any]:
    # The times let the database use an index. The batch IDs select the rows.
    times = sorted(times_us)
    events = select(_events.c.finished_us, *_series_columns(), literal(1), *(_events.c[name] for name in AMOUNTS[1:]))
    events = events.where(_events.c.finished_us.in_(times), _events.c.batch_id.in_(batch_ids))
    adjustments = select(
        _adjustments.c.created_us, *_series_columns(), literal(0), *(_adjustments.c[name] for name in AMOUNTS[1:])
    ).select_from(_adjustments.join(_events, _events.c.request_id == _adjustments.c.request_id))
    adjustments = adjustments.where(_adjustments.c.created_us.in_(times), _adjustments.c.batch_id.in_(batch_ids))
    return union_all(events, adjustments)


def _series_columns() -> list[ColumnElement[Any]]:
    return [func.coalesce(_events.c[name], "") for name in SERIES]


def _sums(facts: Iterable[_Fact]) -> Sums:
    sums: Sums = {}
    for fact in facts:
        _add_to(sums, (fact.at_us - fact.at_us % MINUTE_US, fact.series), fact.amounts)
    return sums


def _by_spans(sums: Sums, grain: Grain) -> dict[int, Sums]:
    is_kept = [name in grain.keeps for name in SERIES]
    finest: Sums = {}
    for (at_us, key), amounts in sums.items():
        kept = tuple(value if keep else "" for value, keep in zip(key, is_kept, strict=True))
        _add_to(finest, (at_us, kept), amounts)
    found: dict[int, Sums] = {}
    for span_us in sorted(grain.spans_us):
        longer: Sums = {}
        for (at_us, key), amounts in finest.items():
            _add_to(longer, (at_us - at_us % span_us, key), amounts)
        # Each span length is a multiple of the previous one.
        found[span_us] = finest = longer
    return found


def _add_to(sums: Sums, place: tuple[int, SeriesKey], amounts: Sequence[int]) -> None:
    row = sums.get(place)
    if row is None:
        sums[place] = list(amounts)
    else:
        for index, amount in enumerate(amounts):
            row[index] += amount


def _upsert(connection: Connection, rows: Sequence[_RollupRow]) -> None:
    names = _RollupRow._fields
    added = upsert(connection, _rollups)
    if connection.dialect.name == "postgresql":
        # With arrays, any number of rows needs only one statement, whose plan is reused.
        arrays = [func.unnest(cast(bindparam(name), ARRAY(_rollups.c[name].type))) for name in names]
        added = added.from_select(list(names), select(*arrays))
    statement = added.on_conflict_do_update(
        index_elements=[column.name for column in _rollups.primary_key],
        set_={name: _rollups.c[name] + added.excluded[name] for name in AMOUNTS},
    )
    if connection.dialect.name == "postgresql":
        connection.execute(statement, dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))
    else:
        connection.execute(statement, [row._asdict() for row in rows])
