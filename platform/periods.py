"""The days and months of a timezone as half-open ranges of microseconds, across daylight-saving changes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from enum import StrEnum
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

import structlog

MAX_ZONE = 64

log = structlog.get_logger(__name__)


class Period(StrEnum):
    DAY = "day"
    MONTH = "month"


@dataclass(frozen=True, slots=True)
class Window:
    """A half-open time range, `[start_us, end_us)`."""

    start_us: int
    end_us: int


NO_WINDOW = Window(0, 2**62)
"""The window of metrics that are not counted per day or month."""


def is_timezone(name: str) -> bool:
    """Return whether this machine knows the IANA timezone `name`."""
    return len(name) <= MAX_ZONE and name in _zones()


def window_at(period: Period, timezone: str, now_us: int) -> Window:
    """Return the day or month that contains `now_us` in the given timezone.

    If clocks skip midnight, the period starts at the skip. If midnight occurs twice, it starts at the first midnight.
    On a host that does not know the timezone, the period is UTC's, which has counters of its own.
    """
    zone = _zone(timezone)
    today = datetime.fromtimestamp(now_us // 1_000_000, UTC).astimezone(zone).date()
    window = _window(period, zone, today)
    # When clocks are set back across midnight, the local date returns to yesterday, but that day has already ended.
    return window if now_us < window.end_us else _window(period, zone, today + timedelta(days=1))


def _window(period: Period, zone: tzinfo, day: date) -> Window:
    if period is Period.DAY:
        first, following = day, day + timedelta(days=1)
    else:
        first = day.replace(day=1)
        following = (first + timedelta(days=31)).replace(day=1)
    return Window(_midnight_us(zone, first), _midnight_us(zone, following))


def _midnight_us(zone: tzinfo, day: date) -> int:
    # fold=0, the default, selects the earlier of two midnights. For a skipped midnight, it gives the time of the skip.
    return int(datetime.combine(day, time.min, zone).timestamp()) * 1_000_000


@lru_cache(maxsize=1)
def _zones() -> frozenset[str]:
    return frozenset(available_timezones())


@lru_cache(maxsize=1024)
def _zone(name: str) -> tzinfo:
    try:
        return ZoneInfo(name)
    except ZoneInfoNotFoundError:
        # Another server, with other timezone data, has accepted the name.
        log.warning("this host does not know a timezone and counts its days and months in UTC", timezone=name)
        return UTC
