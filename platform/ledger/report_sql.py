"""Builds the single SQL statement that answers a query on the ledger."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Select,
    Subquery,
    Table,
    TextClause,
    cast,
    false,
    func,
    literal,
    literal_column,
    select,
    text,
    union_all,
)

from loramux.migrations import schema
from loramux.migrations.unlikely import unlikely
from loramux.platform.ledger.grains import AMOUNTS, DAY_US, HOUR_US, Grain
from loramux.platform.ledger.query import GROUPED_BY, UsageQuery
from loramux.platform.ledger.ranges import BUCKET_US, Cut, Range, cut

Condition = ColumnElement[bool] | ColumnElement[Any] | TextClause

OPTIONAL = {"adapter", "version", "end_user"}
"""Groups for which some requests have no value. Their value is then ""."""

_events, _adjustments, _batches = schema.usage_events, schema.usage_adjustments, schema.usage_batches
_series, _rollups, _tenants = schema.usage_series, schema.usage_rollups, schema.tenants


def select_all(query: UsageQuery, days: Sequence[int]) -> Select[Any]:
    """Select the bucket, the groups and the sums, in that order. `days` are the bucket starts for local days."""
    grouped = _grouped(query, days)
    names = [*(("bucket_us",) if query.bucket else ()), *query.group_by]
    if "tenant" not in names:
        return grouped.order_by(*names)
    named = _named(grouped.subquery("grouped"), query)
    return named.order_by(*(named.selected_columns[name] for name in names))


def select_num_summed(query: UsageQuery, days: Sequence[int], at_most: int) -> Select[Any]:
    """Count the rows that the query sums, up to `at_most`, using only indexes."""
    grains = query.grains()
    parts = _cut(query, days, grains)
    one: ColumnElement[int] = literal_column("1", BigInteger).label("one")
    rows = [select(one).select_from(_rollups).where(*arm) for arm in _rollup_arms(query, parts, grains, days)]
    rows += [select(one).select_from(table).where(*arm) for table, _, arm in _event_arms(query, parts)]
    return select(func.count()).select_from(union_all(*rows).limit(at_most).subquery("summed"))


def select_largest(query: UsageQuery, top: int) -> Select[Any]:
    """Select the largest groups and their sums. Each row also contains the number and sums of all groups."""
    grouped = _grouped(query, ()).subquery("every_group")
    keys = [grouped.c[name] for name in query.group_by]
    sums = [cast(func.sum(grouped.c[name]).over(), BigInteger).label(f"all_{name}") for name in AMOUNTS]
    # Break ties by key, so that the order is stable.
    first = select(grouped, func.count().over().label("num_groups"), *sums).order_by(_tokens(grouped), *keys).limit(top)
    few = first.subquery("few")
    return _named(few, query).order_by(_tokens(few), *(few.c[name] for name in query.group_by))


def _tokens(grouped: Subquery) -> ColumnElement[Any]:
    return (grouped.c.prompt_tokens + grouped.c.completion_tokens).desc()


def _named(grouped: Subquery, query: UsageQuery) -> Select[Any]:
    """Replace tenant IDs with slugs. Doing this after grouping avoids a join over millions of rows.

    A purged tenant keeps its ID, so its sums are never taken for those of a later tenant with the same slug.
    """
    if "tenant" not in query.group_by:
        return select(grouped)
    slug = func.coalesce(_tenants.c.slug, grouped.c.tenant)
    shown = [slug.label("tenant") if column.name == "tenant" else column for column in grouped.c]
    return select(*shown).join_from(grouped, _tenants, _tenants.c.id == grouped.c.tenant, isouter=True)


def _grouped(query: UsageQuery, days: Sequence[int]) -> Select[Any]:
    grains = query.grains()
    parts = _cut(query, days, grains)
    facts = union_all(
        *_rollup_facts(query, parts, grains, days),
        *_event_facts(query, parts, days),
    ).subquery("facts")
    keys = [facts.c[name] for name in (("bucket_us",) if query.bucket else ()) + query.group_by]
    # PostgreSQL's sums are decimals, which are slow to decode. These values fit in integers.
    sums = [cast(func.coalesce(func.sum(facts.c[name]), 0), BigInteger).label(name) for name in AMOUNTS]
    return select(*keys, *sums).group_by(*keys)


def _cut(query: UsageQuery, days: Sequence[int], spans_us: Collection[int]) -> Cut:
    whole = (query.start_us, query.end_us)
    if not days:
        longest_us = query.end_us if query.bucket is None else BUCKET_US[query.bucket]
        return cut([whole], [span_us for span_us in spans_us if span_us <= longest_us])
    # A rolled-up hour belongs to a single day only if midnights fall on whole hours.
    if HOUR_US in spans_us and all(day % HOUR_US == 0 for day in days[1:]):
        return cut([whole], [span_us for span_us in spans_us if span_us <= HOUR_US])
    return cut(list(zip(days, [*days[1:], query.end_us], strict=True)), [us for us in spans_us if us < DAY_US])


def _rollup_facts(query: UsageQuery, parts: Cut, grains: Mapping[int, Grain], days: Sequence[int]) -> list[Select[Any]]:
    table = _rollups.c
    # Sum by series first, so that each series is joined only once.
    is_by_series = bool(set(query.group_by) - {"tenant"})
    arms = []
    for conditions in _rollup_arms(query, parts, grains, days):
        keys: list[ColumnElement[Any]] = []
        if query.bucket is not None:
            keys.append(_bucket(table.start_us, query.bucket, days).label("bucket_us"))
        if is_by_series:
            keys.append(table.series_id)
        elif query.group_by:
            keys.append(table.tenant_id.label("tenant"))
        arms.append(select(*keys, *(table[name] for name in AMOUNTS)).where(*conditions))
    if not arms:
        return []
    rows = union_all(*arms).subquery("spans")
    names = [column.name for column in rows.c if column.name not in AMOUNTS]
    # Cast to integers again, because PostgreSQL's sums are decimals, which are slower to sum a second time.
    amounts = [cast(func.sum(rows.c[name]), BigInteger).label(name) for name in AMOUNTS]
    sums = select(*(rows.c[name] for name in names), *amounts)
    by_key = sums.group_by(*(rows.c[name] for name in names)).subquery("sums") if names else sums.subquery("sums")
    columns: list[ColumnElement[Any]] = [by_key.c.bucket_us] if query.bucket is not None else []
    for name in query.group_by:
        columns.append((_series.c[GROUPED_BY[name]] if is_by_series else by_key.c.tenant).label(name))
    facts = select(*columns, *(by_key.c[name] for name in AMOUNTS))
    if is_by_series:
        facts = facts.join_from(by_key, _series, _series.c.id == by_key.c.series_id)
    return [facts]


def _series_of_adapters(query: UsageQuery) -> Select[tuple[int]]:
    """Select the series of the query's adapters, in every grain that groups by adapter."""
    assert query.adapter_ids is not None
    of_adapters = select(_series.c.id).where(_series.c.adapter_id.in_(query.adapter_ids))
    return of_adapters if query.tenant_id is None else of_adapters.where(_series.c.tenant_id == query.tenant_id)


def _rollup_arms(
    query: UsageQuery, parts: Cut, grains: Mapping[int, Grain], days: Sequence[int]
) -> Iterator[list[Condition]]:
    """Yield the conditions of each SELECT that reads rollups: one SELECT per range, so that SQLite uses an index."""
    table = _rollups.c
    for span_us, ranges in parts.spans.items():
        # One SELECT per local day would be too many, so one covers all ranges.
        for some in (ranges,) if days else ((one,) for one in ranges):
            conditions: list[Condition] = [table.grain == grains[span_us].number, table.span_us == span_us]
            conditions.append(_within(table.start_us, some))
            if query.tenant_id is not None:
                # Without this hint, SQLite would overestimate the number of one tenant's rows, because many rows sum
                # over all tenants.
                conditions.append(unlikely(table.tenant_id == query.tenant_id))
            if query.adapter_ids is not None:
                conditions.append(table.series_id.in_(_series_of_adapters(query)))
            yield conditions


def _event_arms(query: UsageQuery, parts: Cut) -> Iterator[tuple[Table, Column[int], list[Condition]]]:
    """Yield conditions for all entries at the ends of the range, and for the entries in between that are not yet rolled
    up.
    """
    rolled_up = parts.rolled_up
    for table, time in ((_events, _events.c.finished_us), (_adjustments, _adjustments.c.created_us)):
        of_tenant: list[Condition] = []
        if query.tenant_id is not None:
            of_tenant.append(table.c.tenant_id == query.tenant_id)
        yield table, time, [*of_tenant, _within(time, parts.events, query.tenant_id)]
        if rolled_up:
            # Search the index for the few times of waiting batches, not for the whole range.
            waiting = select(_batches.c.at_us).where(_within(_batches.c.at_us, rolled_up))
            yield table, time, [*of_tenant, time.in_(waiting), table.c.batch_id.in_(select(_batches.c.id))]


def _event_facts(query: UsageQuery, parts: Cut, days: Sequence[int]) -> list[Select[Any]]:
    facts = []
    of_event = _adjustments.join(_events, _events.c.request_id == _adjustments.c.request_id)
    for table, time, conditions in _event_arms(query, parts):
        columns: list[ColumnElement[Any]] = []
        if query.bucket is not None:
            columns.append(_bucket(time, query.bucket, days).label("bucket_us"))
        for name in query.group_by:
            column = _events.c[GROUPED_BY[name]]
            columns.append((func.coalesce(column, "") if name in OPTIONAL else column).label(name))
        num_requests, tables = (1, table) if table is _events else (0, of_event)
        amounts = [literal(num_requests).label("requests"), *(table.c[name] for name in AMOUNTS[1:])]
        if query.adapter_ids is not None:
            conditions.append(_events.c.adapter_id.in_(query.adapter_ids))
        facts.append(select(*columns, *amounts).select_from(tables).where(*conditions))
    return facts


def _within(
    column: Column[int], ranges: Sequence[Range], tenant_id: str | None = None
) -> ColumnElement[bool] | TextClause:
    """Match times in one of the ranges and, with `tenant_id`, only rows of that tenant."""
    if not ranges:
        return false()
    # In a timezone with a half-hour offset, each day has two ranges. The condition is text, because SQLAlchemy would
    # take seconds to build thousands of expressions.
    name, is_of_tenant = f"{column.table.name}.{column.name}", ""
    if tenant_id is not None:
        # Repeat the condition in every range, so that SQLite uses the composite index for each.
        is_of_tenant = f" AND {column.table.name}.tenant_id = :tenant_of_range"
    anyone = _any_of([f"({name} >= {start_us} AND {name} < {end_us}{is_of_tenant})" for start_us, end_us in ranges])
    return text(anyone).bindparams(**({} if tenant_id is None else {"tenant_of_range": tenant_id}))


def _any_of(conditions: Sequence[str]) -> str:
    """Join the conditions with OR in a balanced tree, because SQLite limits expression depth to a thousand."""
    if len(conditions) == 1:
        return conditions[0]
    middle = len(conditions) // 2
    return f"({_any_of(conditions[:middle])} OR {_any_of(conditions[middle:])})"


def _bucket(column: Column[int], bucket: str, days: Sequence[int]) -> ColumnElement[int]:
    """Return the start of a time's bucket: one of `days` if given, otherwise a multiple of the bucket's length."""
    if not days:
        return column - column % BUCKET_US[bucket]
    name = f"{column.table.name}.{column.name}"
    if len(days) == 1:
        # PostgreSQL would not group by a bare constant.
        return literal_column(f"({name} - {name} + {days[0]})", BigInteger)
    return literal_column(_last_before(name, days), BigInteger)


def _last_before(name: str, days: Sequence[int]) -> str:
    """Build a balanced tree, so that each row needs only a logarithmic number of comparisons."""
    if len(days) == 1:
        return str(days[0])
    middle = len(days) // 2
    before, behind = _last_before(name, days[:middle]), _last_before(name, days[middle:])
    return f"CASE WHEN {name} < {days[middle]} THEN {before} ELSE {behind} END"
