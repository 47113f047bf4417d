"""Prefixed, time-ordered identifiers: `ten_` followed by a UUIDv7 (RFC 9562) in hexadecimal."""

from __future__ import annotations

import secrets
import time


def new_id(prefix: str) -> str:
    """Create an identifier such as `ten_01940c2f...`. Identifiers sort by their creation time in milliseconds."""
    milliseconds = time.time_ns() // 1_000_000
    # Draw all bits in one call, because each call can wait for another thread to release the interpreter lock.
    random_bits = secrets.randbits(74)
    value = (milliseconds & 0xFFFF_FFFF_FFFF) << 80 | 0x7 << 76 | (random_bits >> 62) << 64
    value |= 0b10 << 62 | random_bits & (1 << 62) - 1
    return f"{prefix}_{value:032x}"


def new_ordered_id(prefix: str) -> str:
    """Create an identifier that sorts by its creation time in quarters of a microsecond (RFC 9562, section 6.2, method
    3), so that identifiers made one after the other by one process keep their order.
    """
    milliseconds, nanoseconds = divmod(time.time_ns(), 1_000_000)
    fraction = (nanoseconds << 12) // 1_000_000
    value = (milliseconds & 0xFFFF_FFFF_FFFF) << 80 | 0x7 << 76 | fraction << 64
    value |= 0b10 << 62 | secrets.randbits(62)
    return f"{prefix}_{value:032x}"
