"""SQL for sums by model over hours, and over 2, 4, 8 and 16 days instead of weeks.

Step 0012 runs this SQL on the result of `roll_up_ledger`, which step 0011 runs. A monthly report by model sums a row
per model for each span. With 1, 2, 4, 8 and 16 days, a month takes about five spans. With weeks and days, it would take
nine. Before step 0012, the hours at the ends of a month came from the finest grain, which has more series, because it
also distinguishes keys, endpoints and statuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from loramux.migrations.ledger_rollups import roll_up_ledger

_HOUR_US, _DAY_US, _WEEK_US = 3_600_000_000, 86_400_000_000, 604_800_000_000
_DOUBLED_US = tuple(_DAY_US << doublings for doublings in range(5))
_MODELS, _FINEST = 3, 5
"""Numbers of two grains: the grain by tenant and model, and the finest grain."""
_KEPT = ("tenant_id", "adapter_id", "adapter_version_id", "model", "base")
_LEFT_OUT = ("api_key_id", "endpoint", "end_user", "status")
_AMOUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")
_INSERT = f"INSERT INTO usage_rollups (grain, span_us, start_us, tenant_id, series_id, {', '.join(_AMOUNTS)})"


def rebuild_all_rollups() -> Iterator[str]:
    """Return the statements that rebuild every rollup of the newest schema from the ledger."""
    yield from roll_up_ledger()
    yield from sum_up_models()


def sum_up_models() -> Iterator[str]:
    """Return, in order, the statements that add these sums to the result of step 0011."""
    yield _hours()
    yield _delete((_WEEK_US,))
    for shorter_us, longer_us in pairwise(_DOUBLED_US):
        yield _sum_up(shorter_us, longer_us)


def back_to_weeks() -> Iterator[str]:
    """Return the statements that undo `sum_up_models`."""
    yield _delete((_HOUR_US, *_DOUBLED_US[1:]))
    yield _sum_up(_DAY_US, _WEEK_US)


def _hours() -> str:
    same = " AND ".join([*(f"m.{name} = s.{name}" for name in _KEPT), *(f"m.{name} = ''" for name in _LEFT_OUT)])
    sums = ", ".join(f"sum(r.{name})" for name in _AMOUNTS)
    # Match each series once, not once per hour.
    return (
        f"{_INSERT} WITH models AS MATERIALIZED"  # noqa: S608 - only constants, as in this whole file
        f" (SELECT s.id AS part_id, m.id AS model_id FROM usage_series s JOIN usage_series m ON {same})"
        f" SELECT {_MODELS}, {_HOUR_US}, r.start_us, r.tenant_id, models.model_id, {sums}"
        " FROM usage_rollups r JOIN models ON models.part_id = r.series_id"
        f" WHERE r.grain = {_FINEST} AND r.span_us = {_HOUR_US}"
        " GROUP BY r.start_us, r.tenant_id, models.model_id"
        # With this order, PostgreSQL stores the rows contiguously, and a report reads hundreds of pages, not tens of
        # thousands.
        " ORDER BY r.start_us, r.tenant_id, models.model_id"
    )


def _delete(spans_us: tuple[int, ...]) -> str:
    listed = ", ".join(map(str, spans_us))
    return f"DELETE FROM usage_rollups WHERE grain = {_MODELS} AND span_us IN ({listed})"  # noqa: S608


def _sum_up(shorter_us: int, longer_us: int) -> str:
    start = f"start_us - start_us % {longer_us}"
    return (
        f"{_INSERT} SELECT grain, {longer_us}, {start}, tenant_id, series_id,"  # noqa: S608
        f" {', '.join(f'sum({name})' for name in _AMOUNTS)} FROM usage_rollups"
        f" WHERE grain = {_MODELS} AND span_us = {shorter_us} GROUP BY grain, {start}, tenant_id, series_id"
    )
