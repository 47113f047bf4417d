"""Numbers, sizes and times as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec

from loramux.platform.amounts import NANOS, amount_text, field_name, field_text, money_text, size_text

NOTHING = "–"
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 100 else f"{value:,.2f}"


def compact(value: float | None) -> str:
    """Abbreviate a number from 10,000 on to three digits: `12.3k`, `4.56M`."""
    if value is None or abs(value) < 1e4:
        return number(value)
    # Rounded before the unit is chosen: 999,600 is 1M.
    rounded = float(f"{value:.3g}")
    size, unit = next(one for one in UNITS if abs(rounded) >= one[0])
    return f"{rounded / size:,.0f}{unit}" if abs(rounded) >= 100 * size else f"{rounded / size:.3g}{unit}"


def money(nanos: int | None) -> str:
    """Format an amount in billionths of the currency: `1.25`. Amounts below 0.1 are shown exactly."""
    if nanos is None:
        return NOTHING
    return f"{Decimal(nanos) / NANOS:,.2f}" if abs(nanos) >= NANOS // 10 else money_text(nanos)


def size(value: float | None) -> str:
    if value is None:
        return NOTHING
    return size_text(round(value))


def duration(seconds: float | None) -> str:
    if seconds is None:
        return NOTHING
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    for limit, length, unit in ((3600, 60, "min"), (86_400, 3600, "h")):
        if seconds < limit * 1.5:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def ago(at: float | None, now: float) -> str:
    if at is None:
        return "never"
    passed = now - at
    if abs(passed) < 2:
        return "now"
    shown = f"{abs(passed):.0f} s" if abs(passed) < 60 else duration(abs(passed))
    return f"{shown} ago" if passed > 0 else f"in {shown}"


def moment(at: float | None) -> str:
    return NOTHING if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def percent(part: float, whole: float) -> float:
    return max(0.0, min(100.0, 100.0 * part / whole)) if whole else 0.0


def short(value: str | None, length: int = 12) -> str:
    if value is None:
        return NOTHING
    return value if len(value) <= length else f"{value[:length]}…"


def json_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def pretty_json(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


FILTERS: Mapping[str, Callable[..., Any]] = {
    "number": number,
    "compact": compact,
    "money": money,
    "amount": amount_text,
    "field_name": field_name,
    "field_text": field_text,
    "size": size,
    "duration": duration,
    "moment": moment,
    "percent": percent,
    "short": short,
    "json_text": json_text,
    "pretty_json": pretty_json,
}
