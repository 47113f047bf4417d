"""Cuts a report's range into whole spans, read from rollups, and remainders, read from individual events.

All ranges are half-open, `[start_us, end_us)`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from loramux.platform.ledger.grains import DAY_US, HOUR_US, MINUTE_US
from loramux.platform.periods import Period, window_at

BUCKET_US = {"1m": MINUTE_US, "1h": HOUR_US, "1d": DAY_US}

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Cut:
    """A partition of a range: the parts read from spans of each length, and the parts read from events."""

    spans: Mapping[int, tuple[Range, ...]]
    events: tuple[Range, ...]

    @property
    def rolled_up(self) -> tuple[Range, ...]:
        """The parts read from spans of any length, with adjacent ranges merged."""
        merged: list[Range] = []
        for start_us, end_us in sorted(part for parts in self.spans.values() for part in parts):
            if merged and merged[-1][1] == start_us:
                merged[-1] = (merged[-1][0], end_us)
            else:
                merged.append((start_us, end_us))
        return tuple(merged)


def cut(ranges: Sequence[Range], spans_us: Collection[int]) -> Cut:
    """Cut ranges into whole spans of these lengths, preferring the longest."""
    spans: dict[int, tuple[Range, ...]] = {}
    left = list(ranges)
    for span_us in sorted(spans_us, reverse=True):
        pieces = [_whole(start_us, end_us, span_us) for start_us, end_us in left]
        if wholes := tuple(whole for _, whole, _ in pieces if whole[0] < whole[1]):
            spans[span_us] = wholes
        left = [part for head, _, tail in pieces for part in (head, tail) if part[0] < part[1]]
    return Cut(spans, tuple(left))


def local_days(start_us: int, end_us: int, timezone: str) -> list[int]:
    """Return the starts of a range's daily buckets. Days begin at midnight in `timezone`, as for daily budgets."""
    starts = [start_us]
    while (midnight_us := window_at(Period.DAY, timezone, starts[-1]).end_us) < end_us:
        starts.append(midnight_us)
    return starts


def _whole(start_us: int, end_us: int, span_us: int) -> tuple[Range, Range, Range]:
    """Split a range into the part before the first whole span, the whole spans, and the rest. Any part can be empty."""
    first, last = -(-start_us // span_us) * span_us, end_us // span_us * span_us
    if first >= last:
        return (start_us, end_us), (end_us, end_us), (end_us, end_us)
    return (start_us, first), (first, last), (last, end_us)
