"""Prefixed, time-ordered identifiers: `ten_` followed by a UUIDv7 (RFC 9562) in hexadecimal."""

from __future__ import annotations

import secrets
import time


def new_id(prefix: str) -> str:
    """Create an identifier such as `ten_01940c2f...`.

    Identifiers sort by their creation time in quarters of a microsecond (RFC 9562, section 6.2, method 3), so those
    that a process makes one after the other keep their order while the clock is not set back.
    """
    milliseconds, nanoseconds = divmod(time.time_ns(), 1_000_000)
    fraction = (nanoseconds << 12) // 1_000_000
    value = (milliseconds & 0xFFFF_FFFF_FFFF) << 80 | 0x7 << 76 | fraction << 64
    value |= 0b10 << 62 | secrets.randbits(62)
    return f"{prefix}_{value:032x}"
