"""What the rollups keep apart, and over which spans: a report reads the coarsest sums that still answer it exactly.

A series of sums is named by what its requests have in common. The finest grain keeps everything but the end user, and
has as many rows as a quiet tenant has requests; so the sums that are asked of all tenants at once, or over months, are
kept a second time without what such questions do not ask.
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
"""Since 1970, hence from Thursday to Thursday: parts of a longer range, never a bucket of their own."""

DOUBLED_US = tuple(DAY_US << doublings for doublings in range(5))
"""One, two, four, eight and sixteen days, whole ones since 1970."""

AMOUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grain:
    """Sums that keep these columns of a series apart, and have "" in the others; `number` is what the rows say."""

    number: int
    keeps: frozenset[str]
    spans_us: tuple[int, ...]


def _grain(number: int, keeps: Collection[str], *spans_us: int) -> Grain:
    return Grain(number=number, keeps=frozenset(keeps), spans_us=spans_us)


GRAINS = (
    # Of everybody, minutes too: they are few, and parts of the days of every timezone.
    _grain(0, ("base", "endpoint", "status"), MINUTE_US, HOUR_US, DAY_US),
    _grain(1, ("tenant_id", "base", "endpoint", "status"), HOUR_US, DAY_US, WEEK_US),
    _grain(2, ("tenant_id", "api_key_id"), HOUR_US, DAY_US, WEEK_US),
    # The most rows a span of all that are asked of everybody, so that a month is to be of few spans: days are doubled.
    _grain(3, ("tenant_id", "adapter_id", "adapter_version_id", "model", "base"), HOUR_US, QUARTER_DAY_US, *DOUBLED_US),
    _grain(4, ("tenant_id", "end_user"), DAY_US),
    _grain(5, set(SERIES) - {"end_user"}, HOUR_US, DAY_US),
)
"""The coarsest first. Whoever changes them must roll up the ledger anew, as a step of the schema."""


def grains_for(columns: Collection[str]) -> dict[int, Grain]:
    """The grains that answer for sums by these columns, by the length of their spans.

    The coarsest does, and finer ones only for shorter spans than it has: a longer one of theirs has more rows than
    several short ones of its own.
    """
    found: dict[int, Grain] = {}
    for grain in GRAINS:
        if grain.keeps >= set(columns):
            shortest_us = min(found, default=None)
            for span_us in grain.spans_us:
                if shortest_us is None or span_us < shortest_us:
                    found[span_us] = grain
    return found
