"""One report over the ledger: what is asked, and the one statement that answers it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    ColumnElement,
    Row,
    Select,
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
from loramux.migrations.database import Database
from loramux.platform.errors import InvalidRequest
from loramux.platform.quota_windows import is_timezone
from loramux.platform.usage_grains import AMOUNTS, DAY_US, HOUR_US, MINUTE_US, Grain, grains_for
from loramux.platform.usage_ranges import BUCKET_US, Cut, Range, cut, local_days

MAX_BUCKETS = 10_000
MAX_LOCAL_DAYS = 800
LAST_LOCAL_US = 221_845_392_000_000_000
"""The first of January 9000: calendars end soon after."""
MAX_ROWS = 50_000
MAX_SINGLE_US = 31 * DAY_US
"""The longest range of a report that only single requests can answer."""
MAX_SINGLE_OF_ALL_US = DAY_US
"""The same over all tenants."""

_COLUMNS = {
    "tenant": "tenant_id",
    "key": "api_key_id",
    "adapter": "adapter_id",
    "version": "adapter_version_id",
    "model": "model",
    "base": "base",
    "endpoint": "endpoint",
    "end_user": "end_user",
    "status": "status",
}
GROUPS = tuple(_COLUMNS)
# "" stands for none of them.
_OPTIONAL = {"adapter", "version", "end_user"}

_events, _adjustments, _batches = schema.usage_events, schema.usage_adjustments, schema.usage_batches
_series, _rollups, _tenants = schema.usage_series, schema.usage_rollups, schema.tenants


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuestion:
    """Sums of what finished in `[start_us, end_us)`, by bucket and groups; raises InvalidRequest with the field.

    `tenant_id` None is all tenants. `bucket` is `1m`, `1h`, `1d` or None for the whole range; buckets are cut to the
    range, and days begin at the midnights of `timezone`.
    """

    tenant_id: str | None
    start_us: int
    end_us: int
    bucket: str | None = None
    group_by: tuple[str, ...] = ()
    timezone: str = "UTC"

    def __post_init__(self) -> None:
        if not 0 <= self.start_us < 2**62:
            raise InvalidRequest("start is not a time after 1970", param="start")
        if not self.start_us < self.end_us < 2**62:
            raise InvalidRequest("end must lie after start", param="end")
        if self.bucket is not None and self.bucket not in BUCKET_US:
            raise InvalidRequest(f"buckets are {', '.join(BUCKET_US)}", param="bucket")
        if set(self.group_by) - set(GROUPS) or len(set(self.group_by)) != len(self.group_by):
            raise InvalidRequest(f"groups are {', '.join(GROUPS)}, each at most once", param="group_by")
        if not is_timezone(self.timezone):
            raise InvalidRequest("there is no such timezone: use a name such as Europe/Berlin", param="timezone")
        self._check_size()

    def _check_size(self) -> None:
        if self.has_local_days and self.end_us > LAST_LOCAL_US:
            raise InvalidRequest("days of a timezone are known until the year 9000", param="end")
        length_us = self.end_us - self.start_us
        if self.bucket is not None and length_us // BUCKET_US[self.bucket] > MAX_BUCKETS:
            raise InvalidRequest(f"the range holds more than {MAX_BUCKETS} buckets of {self.bucket}", param="bucket")
        if self.has_local_days and length_us // DAY_US > MAX_LOCAL_DAYS:
            raise InvalidRequest(f"a report by days of a timezone spans {MAX_LOCAL_DAYS} of them", param="start")
        is_by_minute = self.bucket == "1m" and MINUTE_US not in self.grains()
        if not is_by_minute and "end_user" not in self.group_by:
            return
        what = "by end user" if "end_user" in self.group_by else "by minute"
        if length_us > MAX_SINGLE_US:
            raise InvalidRequest(f"a report {what} spans {MAX_SINGLE_US // DAY_US} days at most", param="start")
        if self.tenant_id is None and length_us > MAX_SINGLE_OF_ALL_US:
            raise InvalidRequest(f"a report {what} over more than a day is for one tenant", param="tenant")

    @property
    def has_local_days(self) -> bool:
        return self.bucket == "1d" and self.timezone != "UTC"

    def grains(self) -> dict[int, Grain]:
        """What rollups answer it, by the length of their spans."""
        of_tenant = () if self.tenant_id is None else ("tenant_id",)
        return grains_for([*of_tenant, *(_COLUMNS[name] for name in self.group_by)])


class UsageRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Sums over `[start_us, end_us)`; a field that was not grouped by is None. `tenant` is the slug."""

    start_us: int
    end_us: int
    tenant: str | None = None
    key: str | None = None
    adapter: str | None = None
    version: str | None = None
    model: str | None = None
    base: str | None = None
    endpoint: str | None = None
    end_user: str | None = None
    status: str | None = None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_nanos: int


def answer(database: Database, question: UsageQuestion) -> tuple[UsageRow, ...]:
    """The rows, oldest bucket first, then by the groups' values. Raises InvalidRequest for too many of them.

    Whole spans are answered by the rollups and by what waits to be added to them; the cut ends by events. It is one
    statement, so that a fold that commits meanwhile is seen wholly or not at all. An adjustment counts when it
    was written, with its request's groups and no request of its own.
    """
    days = local_days(question.start_us, question.end_us, question.timezone) if question.has_local_days else []
    with database.read() as connection:
        rows = connection.execute(_statement(question, days).limit(MAX_ROWS + 1)).all()
    if len(rows) > MAX_ROWS:
        raise InvalidRequest(
            f"the report has more than {MAX_ROWS} rows: take fewer groups, longer buckets or a shorter range",
            param="group_by",
        )
    ends = dict(zip(days, [*days[1:], question.end_us], strict=False))
    return tuple(_rows(rows, question, ends))


def _statement(question: UsageQuestion, days: Sequence[int]) -> Select[Any]:
    grains = question.grains()
    parts = _cut(question, days, grains)
    facts = union_all(
        *_rollup_facts(question, parts, grains, days),
        *_event_facts(question, parts, days),
    ).subquery("facts")
    keys = [facts.c[name] for name in (("bucket_us",) if question.bucket else ()) + question.group_by]
    # PostgreSQL's sums are decimals, which take the driver a while; these are integers that fit.
    sums = [cast(func.coalesce(func.sum(facts.c[name]), 0), BigInteger).label(name) for name in AMOUNTS]
    grouped = select(*keys, *sums)
    if not keys:
        return grouped
    grouped = grouped.group_by(*keys)
    if "tenant" not in question.group_by:
        return grouped.order_by(*(key.name for key in keys))
    # The few names come last: millions of rows need only identifiers.
    sub = grouped.subquery("grouped")
    shown = [_tenants.c.slug.label("tenant") if column.name == "tenant" else column for column in sub.c]
    named = select(*shown).join_from(sub, _tenants, _tenants.c.id == sub.c.tenant)
    return named.order_by(*(column for column, key in zip(shown, keys, strict=False)))


def _cut(question: UsageQuestion, days: Sequence[int], spans_us: Collection[int]) -> Cut:
    whole = (question.start_us, question.end_us)
    if not days:
        longest_us = question.end_us if question.bucket is None else BUCKET_US[question.bucket]
        return cut([whole], [span_us for span_us in spans_us if span_us <= longest_us])
    # Only where midnights lie on whole hours does a rolled-up hour belong to one day.
    if HOUR_US in spans_us and all(day % HOUR_US == 0 for day in days[1:]):
        return cut([whole], [span_us for span_us in spans_us if span_us <= HOUR_US])
    return cut(list(zip(days, [*days[1:], question.end_us], strict=True)), [us for us in spans_us if us < DAY_US])


def _rollup_facts(
    question: UsageQuestion, parts: Cut, grains: Mapping[int, Grain], days: Sequence[int]
) -> list[Select[Any]]:
    table = _rollups.c
    # Summed up by series first, so that what they are is looked up once for each.
    is_by_series = bool(set(question.group_by) - {"tenant"})
    arms = []
    for span_us, ranges in _arms(parts, days):
        keys: list[ColumnElement[Any]] = []
        if question.bucket is not None:
            keys.append(_bucket(table.start_us, question.bucket, days).label("bucket_us"))
        if is_by_series:
            keys.append(table.series_id)
        elif question.group_by:
            keys.append(table.tenant_id.label("tenant"))
        arm = select(*keys, *(table[name] for name in AMOUNTS))
        arm = arm.where(table.grain == grains[span_us].number, table.span_us == span_us)
        arm = arm.where(_within(table.start_us, ranges))
        if question.tenant_id is not None:
            arm = arm.where(table.tenant_id == question.tenant_id)
        arms.append(arm)
    if not arms:
        return []
    rows = union_all(*arms).subquery("spans")
    names = [column.name for column in rows.c if column.name not in AMOUNTS]
    sums = select(*(rows.c[name] for name in names), *(func.sum(rows.c[name]).label(name) for name in AMOUNTS))
    by_key = sums.group_by(*(rows.c[name] for name in names)).subquery("sums") if names else sums.subquery("sums")
    columns: list[ColumnElement[Any]] = [by_key.c.bucket_us] if question.bucket is not None else []
    for name in question.group_by:
        columns.append((_series.c[_COLUMNS[name]] if is_by_series else by_key.c.tenant).label(name))
    query = select(*columns, *(by_key.c[name] for name in AMOUNTS))
    if is_by_series:
        query = query.join_from(by_key, _series, _series.c.id == by_key.c.series_id)
    return [query]


def _arms(parts: Cut, days: Sequence[int]) -> Iterator[tuple[int, Sequence[Range]]]:
    """A part of the statement for each range, which SQLite finds by an index; a timezone has too many for that."""
    for span_us, ranges in parts.spans.items():
        if days:
            yield span_us, ranges
        else:
            yield from ((span_us, (part,)) for part in ranges)


def _event_facts(question: UsageQuestion, parts: Cut, days: Sequence[int]) -> list[Select[Any]]:
    """Single events and adjustments: all of the cut ends, and of the rest those that wait for the rollups."""
    facts = []
    of_event = _adjustments.join(_events, _events.c.request_id == _adjustments.c.request_id)
    rolled_up = parts.rolled_up
    for table, time, tables, num_requests in (
        (_events, _events.c.finished_us, _events, 1),
        (_adjustments, _adjustments.c.created_us, of_event, 0),
    ):
        columns: list[ColumnElement[Any]] = []
        if question.bucket is not None:
            columns.append(_bucket(time, question.bucket, days).label("bucket_us"))
        for name in question.group_by:
            column = _events.c[_COLUMNS[name]]
            columns.append((func.coalesce(column, "") if name in _OPTIONAL else column).label(name))
        amounts = [literal(num_requests).label("requests"), *(table.c[name] for name in AMOUNTS[1:])]
        query = select(*columns, *amounts)
        if question.tenant_id is not None:
            query = query.where(table.c.tenant_id == question.tenant_id)
        facts.append(query.select_from(tables).where(_within(time, parts.events, question.tenant_id)))
        if rolled_up:
            # The few times of batches that wait are what an index is asked for, never the long range itself.
            waiting = select(_batches.c.at_us).where(_within(_batches.c.at_us, rolled_up))
            facts.append(
                query.select_from(tables).where(time.in_(waiting), table.c.batch_id.in_(select(_batches.c.id)))
            )
    return facts


def _within(
    column: Column[int], ranges: Sequence[Range], tenant_id: str | None = None
) -> ColumnElement[bool] | TextClause:
    """Whether a time lies in one of the ranges, and if a tenant is given is its own."""
    if not ranges:
        return false()
    # A timezone of half hours has two ranges a day: as text, since SQLAlchemy takes seconds over thousands of parts.
    name, is_of_tenant = f"{column.table.name}.{column.name}", ""
    if tenant_id is not None:
        # In every range, so that SQLite takes the index of both for each.
        is_of_tenant = f" AND {column.table.name}.tenant_id = :tenant_of_range"
    anyone = _any_of([f"({name} >= {start_us} AND {name} < {end_us}{is_of_tenant})" for start_us, end_us in ranges])
    return text(anyone).bindparams(**({} if tenant_id is None else {"tenant_of_range": tenant_id}))


def _any_of(conditions: Sequence[str]) -> str:
    """One of them holds: a tree of them, of which SQLite takes no more than a thousand in depth."""
    if len(conditions) == 1:
        return conditions[0]
    middle = len(conditions) // 2
    return f"({_any_of(conditions[:middle])} OR {_any_of(conditions[middle:])})"


def _bucket(column: Column[int], bucket: str, days: Sequence[int]) -> ColumnElement[int]:
    """The start of the bucket that a time lies in: of a fixed length, or the last of `days` before it."""
    if not days:
        return column - column % BUCKET_US[bucket]
    name = f"{column.table.name}.{column.name}"
    if len(days) == 1:
        # Not a constant alone, by which PostgreSQL would not group.
        return literal_column(f"({name} - {name} + {days[0]})", BigInteger)
    return literal_column(_last_before(name, days), BigInteger)


def _last_before(name: str, days: Sequence[int]) -> str:
    """A tree of comparisons, so that a row needs as many as its depth."""
    if len(days) == 1:
        return str(days[0])
    middle = len(days) // 2
    before, behind = _last_before(name, days[:middle]), _last_before(name, days[middle:])
    return f"CASE WHEN {name} < {days[middle]} THEN {before} ELSE {behind} END"


def _rows(rows: Sequence[Row[Any]], question: UsageQuestion, ends: Mapping[int, int]) -> Iterator[UsageRow]:
    """Rows of the bucket, the groups and the amounts, in this order; there are thousands of them."""
    start_us, end_us = question.start_us, question.end_us
    num_buckets, groups = int(question.bucket is not None), question.group_by
    optional = _OPTIONAL.intersection(groups)
    for row in rows:
        if question.bucket is not None:
            bucket_us = row[0]
            following_us = ends[bucket_us] if ends else bucket_us + BUCKET_US[question.bucket]
            start_us, end_us = max(question.start_us, bucket_us), min(question.end_us, following_us)
        fields = dict(zip(groups, row[num_buckets:], strict=False))
        for name in optional:
            fields[name] = fields[name] or None
        requests, prompt, cached, completion, cost = row[num_buckets + len(groups) :]
        yield UsageRow(
            start_us=start_us,
            end_us=end_us,
            requests=requests,
            prompt_tokens=prompt,
            cached_tokens=cached,
            completion_tokens=completion,
            cost_nanos=cost,
            **fields,
        )
