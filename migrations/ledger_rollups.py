"""SQL that rebuilds all rollups from the ledger, as step 0011 does.

Nothing else may write while these statements run. Step 0011 ensures this. The statements have been released and must
not change. A later step that needs different sums adds its own statements, as `model_spans.py` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

_MINUTE_US, _HOUR_US, _QUARTER_DAY_US = 60_000_000, 3_600_000_000, 21_600_000_000
_DAY_US, _WEEK_US = 86_400_000_000, 604_800_000_000

_SERIES = (
    "tenant_id",
    "api_key_id",
    "adapter_id",
    "adapter_version_id",
    "model",
    "base",
    "endpoint",
    "end_user",
    "status",
)
_AMOUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")

_FACTS = """
    SELECT finished_us AS at_us, tenant_id, api_key_id, coalesce(adapter_id, '') AS adapter_id,
           coalesce(adapter_version_id, '') AS adapter_version_id, model, base, endpoint,
           coalesce(end_user, '') AS end_user, status,
           1 AS requests, prompt_tokens, cached_tokens, completion_tokens, cost_nanos
    FROM usage_events
    UNION ALL
    SELECT a.created_us, e.tenant_id, e.api_key_id, coalesce(e.adapter_id, ''),
           coalesce(e.adapter_version_id, ''), e.model, e.base, e.endpoint,
           coalesce(e.end_user, ''), e.status,
           0, a.prompt_tokens, a.cached_tokens, a.completion_tokens, a.cost_nanos
    FROM usage_adjustments a JOIN usage_events e ON e.request_id = a.request_id
"""

_FINEST, _FINEST_KEEPS = 5, tuple(name for name in _SERIES if name != "end_user")
_OF_HOURS = (
    (1, ("tenant_id", "base", "endpoint", "status"), (_HOUR_US, _DAY_US, _WEEK_US)),
    (2, ("tenant_id", "api_key_id"), (_HOUR_US, _DAY_US, _WEEK_US)),
    (3, ("tenant_id", "adapter_id", "adapter_version_id", "model", "base"), (_QUARTER_DAY_US, _DAY_US, _WEEK_US)),
)
"""Grains computed from the hourly sums of the finest grain."""


def roll_up_ledger() -> Iterator[str]:
    for table in ("usage_rollups", "usage_series", "usage_batches"):
        yield f"DELETE FROM {table}"  # noqa: S608 - only constants, as in this whole file
    yield from _grain(_FINEST, _FINEST_KEEPS, (_HOUR_US, _DAY_US), _FACTS)
    yield from _grain(0, ("base", "endpoint", "status"), (_MINUTE_US, _HOUR_US, _DAY_US), _FACTS)
    yield from _grain(4, ("tenant_id", "end_user"), (_DAY_US,), _FACTS)
    hours = (
        f"SELECT r.start_us AS at_us, {', '.join(f's.{name}' for name in _SERIES)},"  # noqa: S608
        f" {', '.join(f'r.{name}' for name in _AMOUNTS)}"
        f" FROM usage_rollups r JOIN usage_series s ON s.id = r.series_id"
        f" WHERE r.grain = {_FINEST} AND r.span_us = {_HOUR_US}"
    )
    for number, keeps, spans_us in _OF_HOURS:
        yield from _grain(number, keeps, spans_us, hours)


def _grain(number: int, keeps: Sequence[str], spans_us: Sequence[int], facts: str) -> Iterator[str]:
    names, sums = ", ".join(_SERIES), ", ".join(f"sum({name}) AS {name}" for name in _AMOUNTS)
    kept = ", ".join(name if name in keeps else f"'' AS {name}" for name in _SERIES)
    start = f"at_us - at_us % {spans_us[0]}"
    summed = (
        f"SELECT {start} AS start_us, {kept}, {sums} FROM ({facts}) AS facts"  # noqa: S608
        f" GROUP BY {start}, {', '.join(keeps)}"
    )
    yield (
        f"INSERT INTO usage_series ({names}) SELECT DISTINCT {kept} FROM ({facts}) AS facts"  # noqa: S608
        " WHERE true ON CONFLICT DO NOTHING"
    )
    same = " AND ".join(f"s.{name} = f.{name}" for name in _SERIES)
    yield (
        f"{_insert()} SELECT {number}, {spans_us[0]}, f.start_us, f.tenant_id, s.id,"  # noqa: S608
        f" {', '.join(f'f.{name}' for name in _AMOUNTS)} FROM ({summed}) AS f JOIN usage_series s ON {same}"
    )
    for shorter_us, longer_us in pairwise(spans_us):
        start = f"start_us - start_us % {longer_us}"
        yield (
            f"{_insert()} SELECT {number}, {longer_us}, {start}, tenant_id, series_id,"  # noqa: S608
            f" {', '.join(f'sum({name})' for name in _AMOUNTS)} FROM usage_rollups"
            f" WHERE grain = {number} AND span_us = {shorter_us} GROUP BY {start}, tenant_id, series_id"
        )


def _insert() -> str:
    return f"INSERT INTO usage_rollups (grain, span_us, start_us, tenant_id, series_id, {', '.join(_AMOUNTS)})"
