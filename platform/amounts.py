"""Amounts as people read and write them: money in the currency, bytes in binary units, and counts.

Money is stored in nanos, billionths of the currency's unit, so that amounts are integers. The database and REST use
nanos. Texts for people use the currency.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

NANOS = 10**9
"""Nanos in one unit of the currency."""

NANOS_UNIT = "nanos"
BYTES_UNIT = "bytes"

_FIELD_UNITS = (NANOS_UNIT, BYTES_UNIT, "us")
_SIZES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
# A comma only separates thousands: "1,5" is refused, because it could mean 1.5 or 15.
_WHOLE = r"([0-9]{1,18}|[0-9]{1,3}(?:,[0-9]{3}){1,5})"
_MONEY = re.compile(rf"{_WHOLE}(?:\.([0-9]{{1,9}}))?", re.ASCII)
_COUNT = re.compile(_WHOLE, re.ASCII)
_SIZE = re.compile(rf"([0-9]{{1,18}})(?:\.([0-9]{{1,3}}))?\s*({'|'.join(_SIZES)})", re.ASCII)


def nanos_of(text: str) -> int:
    """Parse an amount of the currency with up to nine decimal places, such as `5` or `1,500.25`. Raises ValueError."""
    found = _MONEY.fullmatch(text.strip())
    if found is None:
        raise ValueError("an amount of money must be a decimal number with at most nine decimal places, such as 0.15")
    return int(found[1].replace(",", "")) * NANOS + int((found[2] or "").ljust(9, "0"))


def amount_of(text: str, unit: str) -> int:
    """Parse an amount as `amount_text` writes it: money in the currency, bytes as a number or with a binary unit, and
    anything else as a whole number. Raises ValueError.
    """
    if unit == NANOS_UNIT:
        return nanos_of(text)
    if unit == BYTES_UNIT and (found := _SIZE.fullmatch(text.strip())):
        thousandths = int(found[1]) * 1000 + int((found[2] or "").ljust(3, "0"))
        return thousandths * _SIZES[found[3]] // 1000
    counted = _COUNT.fullmatch(text.strip())
    if counted is None:
        units = " or a size such as 1.5 GiB" if unit == BYTES_UNIT else ""
        raise ValueError(f"an amount of {unit} must be a whole number{units}, with at most 18 digits and no sign")
    return int(counted[1].replace(",", ""))


def amount_text(amount: int, unit: str) -> str:
    """Format an amount: exact money in the currency, bytes in a binary unit, and other counts in full."""
    if unit == NANOS_UNIT:
        return money_text(amount)
    return size_text(amount) if unit == BYTES_UNIT else f"{amount:,}"


def money_text(nanos: int) -> str:
    """Format an amount of money exactly, with two to nine decimal places: `1,500.25`."""
    whole, part = divmod(abs(nanos), NANOS)
    return f"{'-' if nanos < 0 else ''}{whole:,}.{f'{part:09d}'.rstrip('0').ljust(2, '0')}"


def decimal(nanos: int) -> str:
    """Format an amount of money for programs: nine decimal places and no thousands separators."""
    whole, part = divmod(abs(nanos), NANOS)
    return f"{'-' if nanos < 0 else ''}{whole}.{part:09d}"


def size_text(num_bytes: int) -> str:
    """Format a number of bytes: `1.5 GiB`."""
    unit, size = next(((unit, size) for unit, size in reversed(_SIZES.items()) if abs(num_bytes) >= size), ("B", 1))
    return f"{num_bytes / size:,.{0 if size == 1 else 1}f} {unit}"


def field_name(name: str) -> str:
    """Return a field's name without its unit: `limit` for `limit_nanos`."""
    stem, _, unit = name.rpartition("_")
    return stem if stem and unit in _FIELD_UNITS else name


def field_text(value: object, name: str) -> object:
    """Format the value of a field whose name ends in its unit: `_nanos`, `_bytes` or `_us`, a Unix time in
    microseconds. Any other value is returned as it is.
    """
    unit = name.rpartition("_")[2]
    if unit not in _FIELD_UNITS or not isinstance(value, int):
        return value
    if unit != "us":
        return amount_text(value, unit)
    return datetime.fromtimestamp(value / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if value < 2**57 else value
