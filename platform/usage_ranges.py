"""How a report's range is cut: whole days and hours that the rollups hold, and the rest that single events must answer.

All ranges are half-open, `[start_us, end_us)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loramux.platform.quota_metrics import Period
from loramux.platform.quota_windows import window_at
from loramux.platform.usage_rollups import DAY_US, HOUR_US

BUCKET_US = {"1m": 60_000_000, "1h": HOUR_US, "1d": DAY_US}

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """The parts of a range, without overlap and without a gap: what days, what hours and what events answer."""

    days: tuple[Range, ...]
    hours: tuple[Range, ...]
    events: tuple[Range, ...]


def cut(ranges: Sequence[Range], bucket: str | None) -> Cut:
    """Cut ranges so that no part is longer than the bucket; None is one bucket for everything."""
    days: list[Range] = []
    hours: list[Range] = []
    events: list[Range] = []
    for start_us, end_us in ranges:
        if bucket == "1m":
            events.append((start_us, end_us))
            continue
        head, whole, tail = _whole(start_us, end_us, HOUR_US)
        events += [part for part in (head, tail) if part[0] < part[1]]
        if bucket == "1h":
            hours += [whole] if whole[0] < whole[1] else []
            continue
        head, whole, tail = _whole(*whole, DAY_US)
        hours += [part for part in (head, tail) if part[0] < part[1]]
        days += [whole] if whole[0] < whole[1] else []
    return Cut(tuple(days), tuple(hours), tuple(events))


def local_days(start_us: int, end_us: int, timezone: str) -> list[int]:
    """Where the buckets of a range begin that is cut at a timezone's midnights, as day budgets are."""
    starts = [start_us]
    while (midnight_us := window_at(Period.DAY, timezone, starts[-1]).end_us) < end_us:
        starts.append(midnight_us)
    return starts


def _whole(start_us: int, end_us: int, span_us: int) -> tuple[Range, Range, Range]:
    """The part before the first whole span, the whole ones, and the part behind them; each may be empty."""
    first, last = -(-start_us // span_us) * span_us, end_us // span_us * span_us
    if first >= last:
        return (start_us, end_us), (end_us, end_us), (end_us, end_us)
    return (start_us, first), (first, last), (last, end_us)
