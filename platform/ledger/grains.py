"""The columns and time spans that rollups group by.

A report reads the coarsest sums that give an exact answer. A series is identified by the column values that its
requests share. The finest grain keeps every column except the end user. For a tenant with little traffic, this grain
has about one row per request. Queries over all tenants or over months therefore have their own sums, without the
columns that they never use.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from loramux.migrations.schema import SERIES

MINUTE_US = 60_000_000
HOUR_US = 60 * MINUTE_US
QUARTER_DAY_US = 6 * HOUR_US
DAY_US = 24 * HOUR_US
WEEK_US = 7 * DAY_US
"""Weeks are aligned to the Unix epoch, so they begin on Thursdays. Reports use them for parts of ranges, never as
buckets.
"""

DOUBLED_US = tuple(DAY_US << doublings for doublings in range(5))
"""One, two, four, eight and sixteen days, aligned to the Unix epoch."""

VERSION_GRAIN = 3
"""The number of the coarsest grain that keeps a tenant's versions."""

AMOUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grain:
    """Sums grouped by the columns in `keeps`. Other columns are "". `number` identifies the grain in rollup rows."""

    number: int
    keeps: frozenset[str]
    spans_us: tuple[int, ...]


def _grain(number: int, keeps: Collection[str], *spans_us: int) -> Grain:
    return Grain(number=number, keeps=frozenset(keeps), spans_us=spans_us)


GRAINS = (
    # Sums over all tenants also exist per minute. There are few of them, and in every timezone a day consists of whole
    # minutes.
    _grain(0, ("base", "endpoint", "status"), MINUTE_US, HOUR_US, DAY_US),
    _grain(1, ("tenant_id", "base", "endpoint", "status"), HOUR_US, DAY_US, WEEK_US),
    _grain(2, ("tenant_id", "api_key_id"), HOUR_US, DAY_US, WEEK_US),
    # Of the grains that are queried over all tenants, this one has the most rows per span. With spans that double in
    # length, a few spans cover a month.
    _grain(
        VERSION_GRAIN,
        ("tenant_id", "adapter_id", "adapter_version_id", "model", "base"),
        HOUR_US,
        QUARTER_DAY_US,
        *DOUBLED_US,
    ),
    _grain(4, ("tenant_id", "end_user"), DAY_US),
    _grain(5, set(SERIES) - {"end_user"}, HOUR_US, DAY_US),
)
"""All grains, coarsest first. Changing them requires a migration that changes the stored sums. It must keep the sums of
erased entries, which are no longer in the ledger: see `erasure.py`.
"""


def grains_for(columns: Collection[str]) -> dict[int, Grain]:
    """Return the grains that have sums by these columns, keyed by span length.

    Coarser grains are preferred. A finer grain is used only for spans shorter than the shortest span of the coarser
    grain, because a long span of the finer grain has more rows than several short spans of the coarser grain.
    """
    found: dict[int, Grain] = {}
    for grain in GRAINS:
        if grain.keeps >= set(columns):
            shortest_us = min(found, default=None)
            for span_us in grain.spans_us:
                if shortest_us is None or span_us < shortest_us:
                    found[span_us] = grain
    return found
