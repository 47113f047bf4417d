"""The arithmetic of a rate: a bucket that refills at `limit` a minute up to `burst`, in exact integers."""

from __future__ import annotations

from dataclasses import dataclass

UNITS = 60_000_000
"""Microseconds in a minute: in this unit a bucket gains exactly `limit` a microsecond."""

MAX_LIMIT = 100_000_000_000
"""Keeps `MAX_LIMIT * UNITS` inside a 64-bit column."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """`level` counts units and may be negative after a settlement; `reserved` counts whole requests or tokens."""

    level: int
    reserved: int
    refilled_us: int

    def refilled(self, limit: int, burst: int, now_us: int) -> Bucket:
        """The bucket at `now_us`; a clock that went back refills nothing and takes nothing away."""
        now_us = max(now_us, self.refilled_us)
        level = min(burst * UNITS, self.level + limit * (now_us - self.refilled_us))
        return Bucket(level, self.reserved, now_us)

    @property
    def free_units(self) -> int:
        return self.level - self.reserved * UNITS

    @property
    def remaining(self) -> int:
        """Whole requests or tokens that are free now."""
        return max(0, self.free_units // UNITS)

    def wait_us(self, cost: int, limit: int) -> int:
        """Time until `cost` is free if nothing more is used: 0 when it is now. `limit` must be positive."""
        return max(0, -(-(cost * UNITS - self.free_units) // limit))
