"""Computes reports over the ledger, either by bucket and group or for the largest groups only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import Connection

from loramux.migrations.database import LONGEST_READ_S, Database
from loramux.platform.errors import InvalidRequest
from loramux.platform.ledger.grains import AMOUNTS
from loramux.platform.ledger.query import UsageQuery
from loramux.platform.ledger.ranges import BUCKET_US, local_days
from loramux.platform.ledger.report_sql import OPTIONAL, select_all, select_largest, select_num_summed

MAX_ROWS = 50_000
MAX_TOP = 1000

_UNCACHED = {"compiled_cache": None}
"""Keeps SQLAlchemy from caching compiled reports.

Reports have different ranges and would fill the cache with tens of thousands of objects. Every full garbage collection
would traverse these objects while all requests wait.
"""


class UsageRow(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Sums over `[start_us, end_us)`. Fields that are not in `group_by` are None. `tenant` is the slug."""

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
    service_tier: str | None = None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_nanos: int


@dataclass(frozen=True, slots=True)
class LargestRows:
    """`rows` contains the largest groups. `num_groups` and `total` cover all groups."""

    rows: tuple[UsageRow, ...]
    num_groups: int
    total: UsageRow


def answer(database: Database, query: UsageQuery) -> tuple[UsageRow, ...]:
    """Return the rows, sorted by bucket, oldest first, then by group values.

    Whole spans are read from the rollups and from entries that are not yet rolled up. The ends of the range are read
    from individual events. A single statement reads everything, so it sees a concurrent update of the rollups entirely
    or not at all. An adjustment counts at the time it was written and in its request's groups, but not as another
    request.

    Raises InvalidRequest if the report returns or sums too many rows, or ReadTooLong if it takes too long.
    """
    days = local_days(query.start_us, query.end_us, query.timezone) if query.has_local_days else []
    with database.read(LONGEST_READ_S) as connection:
        _check_summed(connection, query, days)
        rows = connection.execute(select_all(query, days).limit(MAX_ROWS + 1), execution_options=_UNCACHED).all()
    if len(rows) > MAX_ROWS:
        raise InvalidRequest(
            f"the report has more than {MAX_ROWS} rows: use fewer groups, longer buckets or a shorter range",
            param="group_by",
        )
    ends = dict(zip(days, [*days[1:], query.end_us], strict=False))
    return tuple(_rows(rows, query, ends))


def largest(database: Database, query: UsageQuery, top: int) -> LargestRows:
    """Return the groups that used the most tokens, largest first, and the total over all groups.

    The query must not have a bucket. Raises InvalidRequest, with the field's name, or ReadTooLong.
    """
    if query.bucket is not None:
        raise InvalidRequest("the largest groups are computed over the whole range: omit bucket", param="top")
    if not 1 <= top <= MAX_TOP:
        raise InvalidRequest(f"top must be a number from 1 to {MAX_TOP}", param="top")
    with database.read(LONGEST_READ_S) as connection:
        _check_summed(connection, query, ())
        rows = connection.execute(select_largest(query, top), execution_options=_UNCACHED).all()
    # Each row ends with the number of all groups and their sums.
    num_groups, *sums = rows[0][-1 - len(AMOUNTS) :] if rows else [0] * (1 + len(AMOUNTS))
    total = UsageRow(start_us=query.start_us, end_us=query.end_us, **dict(zip(AMOUNTS, sums, strict=True)))
    return LargestRows(tuple(_rows([row[: -1 - len(AMOUNTS)] for row in rows], query, {})), num_groups, total)


def _check_summed(connection: Connection, query: UsageQuery, days: Sequence[int]) -> None:
    """Refuse a report that sums too many rows. Counting rows is fifty times faster than reading them."""
    limit = query.max_summed
    counted = select_num_summed(query, days, limit + 1)
    if connection.execute(counted, execution_options=_UNCACHED).scalar_one() > limit:
        raise InvalidRequest(
            f"the report would sum more than {limit} rows of the ledger: use a shorter range or fewer groups",
            param="start",
            code="report_too_large",
        )


def _rows(rows: Sequence[Sequence[Any]], query: UsageQuery, ends: Mapping[int, int]) -> Iterator[UsageRow]:
    start_us, end_us = query.start_us, query.end_us
    num_buckets, groups = int(query.bucket is not None), query.group_by
    optional = OPTIONAL.intersection(groups)
    for row in rows:
        if query.bucket is not None:
            bucket_us = row[0]
            following_us = ends[bucket_us] if ends else bucket_us + BUCKET_US[query.bucket]
            start_us, end_us = max(query.start_us, bucket_us), min(query.end_us, following_us)
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
