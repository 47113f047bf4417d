"""Sums by model over 2, 4, 8 and 16 days in place of weeks: what step 0012 does to what `roll_up_ledger` made.

A month by model is the sum of ten thousand rows a span: of doubled days it has about five, of weeks and days nine.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

_DAY_US, _WEEK_US = 86_400_000_000, 604_800_000_000
_SPANS_US = tuple(_DAY_US << doublings for doublings in range(5))
_MODELS = 3
"""The number of the grain that keeps tenants and their models apart."""
_AMOUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")


def double_days() -> Iterator[str]:
    """The statements, in their order."""
    yield _delete((_WEEK_US,))
    for shorter_us, longer_us in pairwise(_SPANS_US):
        yield _sum_up(shorter_us, longer_us)


def back_to_weeks() -> Iterator[str]:
    """The statements that undo it."""
    yield _delete(_SPANS_US[1:])
    yield _sum_up(_DAY_US, _WEEK_US)


def _delete(spans_us: tuple[int, ...]) -> str:
    listed = ", ".join(map(str, spans_us))
    return f"DELETE FROM usage_rollups WHERE grain = {_MODELS} AND span_us IN ({listed})"  # noqa: S608 - constants


def _sum_up(shorter_us: int, longer_us: int) -> str:
    start = f"start_us - start_us % {longer_us}"
    return (
        f"INSERT INTO usage_rollups (grain, span_us, start_us, tenant_id, series_id, {', '.join(_AMOUNTS)})"  # noqa: S608
        f" SELECT grain, {longer_us}, {start}, tenant_id, series_id, {', '.join(f'sum({name})' for name in _AMOUNTS)}"
        f" FROM usage_rollups WHERE grain = {_MODELS} AND span_us = {shorter_us}"
        f" GROUP BY grain, {start}, tenant_id, series_id"
    )
