"""SQL that rebuilds all rollups from the ledger.

Nothing else may write to the ledger or to the rollups while the statements run. The sums of erased entries, which are
only in the rollups, are lost. A step that changes the grains must keep them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from loramux.migrations.schema import SERIES

_MINUTE_US, _HOUR_US, _QUARTER_DAY_US, _DAY_US = 60_000_000, 3_600_000_000, 21_600_000_000, 86_400_000_000
_WEEK_US = 7 * _DAY_US
_AMOUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")

_FACTS = """
    SELECT finished_us AS at_us, tenant_id, api_key_id, coalesce(adapter_id, '') AS adapter_id,
           coalesce(adapter_version_id, '') AS adapter_version_id, model, base, endpoint,
           coalesce(end_user, '') AS end_user, status, service_tier,
           1 AS requests, prompt_tokens, cached_tokens, completion_tokens, cost_nanos
    FROM usage_events
    UNION ALL
    SELECT a.created_us, e.tenant_id, e.api_key_id, coalesce(e.adapter_id, ''),
           coalesce(e.adapter_version_id, ''), e.model, e.base, e.endpoint,
           coalesce(e.end_user, ''), e.status, e.service_tier,
           0, a.prompt_tokens, a.cached_tokens, a.completion_tokens, a.cost_nanos
    FROM usage_adjustments a JOIN usage_events e ON e.request_id = a.request_id
"""

_FINEST = 5
_OF_FACTS: Sequence[tuple[int, Sequence[str], Sequence[int]]] = (
    (_FINEST, tuple(name for name in SERIES if name != "end_user"), (_HOUR_US, _DAY_US)),
    (0, ("base", "endpoint", "status"), (_MINUTE_US, _HOUR_US, _DAY_US)),
    (4, ("tenant_id", "end_user"), (_DAY_US,)),
)
"""Grains summed from the ledger: number, kept columns and spans."""
_OF_HOURS: Sequence[tuple[int, Sequence[str], Sequence[int]]] = (
    (1, ("tenant_id", "base", "endpoint", "status"), (_HOUR_US, _DAY_US, _WEEK_US)),
    (2, ("tenant_id", "api_key_id"), (_HOUR_US, _DAY_US, _WEEK_US)),
    (
        3,
        ("tenant_id", "adapter_id", "adapter_version_id", "model", "base"),
        (_HOUR_US, _QUARTER_DAY_US, *(_DAY_US << doublings for doublings in range(5))),
    ),
)
"""Grains summed from the hours of the finest grain."""


def rebuild_all_rollups() -> Iterator[str]:
    """Return, in order, the statements that rebuild every rollup."""
    for table in ("usage_rollups", "usage_series", "usage_batches"):
        yield f"DELETE FROM {table}"
    for number, keeps, spans_us in _OF_FACTS:
        yield from _sum_up_facts(number, keeps, spans_us[0])
        yield from _sum_up_spans(number, spans_us)
    for number, keeps, spans_us in _OF_HOURS:
        yield from _sum_up_hours(number, keeps)
        yield from _sum_up_spans(number, spans_us)


def _sum_up_facts(number: int, keeps: Sequence[str], span_us: int) -> Iterator[str]:
    start, kept = f"at_us - at_us % {span_us}", _kept(keeps)
    yield (
        f"INSERT INTO usage_series ({', '.join(SERIES)}) SELECT DISTINCT {kept} FROM ({_FACTS}) AS facts"
        " WHERE true ON CONFLICT DO NOTHING"
    )
    summed = (
        f"SELECT {start} AS start_us, {kept}, {', '.join(f'sum({name}) AS {name}' for name in _AMOUNTS)}"
        f" FROM ({_FACTS}) AS facts GROUP BY {start}, {', '.join(keeps)}"
    )
    same = " AND ".join(f"s.{name} = f.{name}" for name in SERIES)
    yield (
        f"{_insert()} SELECT {number}, {span_us}, f.start_us, f.tenant_id, s.id,"
        f" {', '.join(f'f.{name}' for name in _AMOUNTS)} FROM ({summed}) AS f JOIN usage_series s ON {same}"
    )


def _sum_up_hours(number: int, keeps: Sequence[str]) -> Iterator[str]:
    yield (
        f"INSERT INTO usage_series ({', '.join(SERIES)}) SELECT DISTINCT {_kept(keeps)} FROM usage_series"
        f" WHERE id IN (SELECT series_id FROM usage_rollups WHERE grain = {_FINEST} AND span_us = {_DAY_US})"
        " ON CONFLICT DO NOTHING"
    )
    same = " AND ".join(f"kept.{name} = s.{name}" if name in keeps else f"kept.{name} = ''" for name in SERIES)
    yield (
        # Match each series once, not once per hour.
        f"{_insert()} WITH parts AS MATERIALIZED"
        f" (SELECT s.id AS part_id, kept.id AS kept_id FROM usage_series s JOIN usage_series kept ON {same})"
        f" SELECT {number}, {_HOUR_US}, r.start_us, r.tenant_id, parts.kept_id,"
        f" {', '.join(f'sum(r.{name})' for name in _AMOUNTS)}"
        " FROM usage_rollups r JOIN parts ON parts.part_id = r.series_id"
        f" WHERE r.grain = {_FINEST} AND r.span_us = {_HOUR_US}"
        " GROUP BY r.start_us, r.tenant_id, parts.kept_id"
        # With this order, PostgreSQL stores the rows contiguously, and a report reads hundreds of pages, not tens of
        # thousands.
        " ORDER BY r.start_us, r.tenant_id, parts.kept_id"
    )


def _sum_up_spans(number: int, spans_us: Sequence[int]) -> Iterator[str]:
    for shorter_us, longer_us in pairwise(spans_us):
        start = f"start_us - start_us % {longer_us}"
        yield (
            f"{_insert()} SELECT {number}, {longer_us}, {start}, tenant_id, series_id,"
            f" {', '.join(f'sum({name})' for name in _AMOUNTS)} FROM usage_rollups"
            f" WHERE grain = {number} AND span_us = {shorter_us} GROUP BY {start}, tenant_id, series_id"
        )


def _kept(keeps: Sequence[str]) -> str:
    return ", ".join(name if name in keeps else f"'' AS {name}" for name in SERIES)


def _insert() -> str:
    return f"INSERT INTO usage_rollups (grain, span_us, start_us, tenant_id, series_id, {', '.join(_AMOUNTS)})"
