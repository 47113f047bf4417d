"""The count of one policy for one subject, and the arithmetic of a rate's bucket, in exact integers."""

from __future__ import annotations

from typing import NamedTuple

from loramux.platform.quotas.metrics import MAX_RATE

UNITS = 60_000_000
"""Microseconds in a minute: in this unit a bucket gains exactly `limit` a microsecond."""


class CounterKey(NamedTuple):
    """Which counter: of a policy, for its subject or a tenant that inherits it, from the start of a window on."""

    policy_id: str
    subject_id: str
    window_start_us: int
    """0 for what has no window."""


class Counter(NamedTuple):
    """What has been counted. `reserved`, `used` and `exceeded` are whole requests, tokens or nanos."""

    level: int
    """A bucket's fill in UNITS; may be negative after a settlement."""
    reserved: int
    """What open reservations hold."""
    used: int
    """What settled requests have used of a budget's window."""
    exceeded: int
    """How often a soft or shadow policy admitted, or extended, what a hard one would have refused."""
    refilled_us: int

    @classmethod
    def fresh(cls, burst: int, now_us: int) -> Counter:
        """A full bucket, and nothing counted."""
        # What is no bucket repeats a limit that may be beyond any bucket's, and has no use for a level.
        return cls(min(burst, MAX_RATE) * UNITS, 0, 0, 0, now_us)

    def refilled(self, limit: int, burst: int, now_us: int) -> Counter:
        """The bucket at `now_us`.

        A clock that stepped back by up to a minute refills nothing until it has caught up. After a longer step the
        bucket refills from `now_us` on, and gives back what it holds of the time that is now counted again: the step
        itself never grants anything.
        """
        elapsed_us = now_us - self.refilled_us
        level = self.level + limit * elapsed_us
        if elapsed_us < -UNITS:
            level = max(level, min(self.level, 0))
        elif elapsed_us < 0:
            level, now_us = self.level, self.refilled_us
        level = min(burst * UNITS, level)
        return Counter(level, self.reserved, self.used, self.exceeded, now_us)

    def changed(self, level: int = 0, reserved: int = 0, used: int = 0, exceeded: int = 0) -> Counter:
        """With so much more of each."""
        return Counter(
            self.level + level, self.reserved + reserved, self.used + used, self.exceeded + exceeded, self.refilled_us
        )

    @property
    def free_units(self) -> int:
        return self.level - self.reserved * UNITS

    def wait_us(self, cost: int, limit: int, now_us: int) -> int:
        """Time until the bucket has `cost` free if nothing more is used: 0 when it does now. `limit` is positive."""
        missing = cost * UNITS - self.free_units
        # A bucket that is ahead of the clock gains nothing until the clock has caught up.
        return -(-missing // limit) + self.refilled_us - now_us if missing > 0 else 0
