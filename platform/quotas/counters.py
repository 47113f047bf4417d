"""The counter of one policy for one subject, and exact integer arithmetic for a rate's token bucket."""

from __future__ import annotations

from typing import NamedTuple

from loramux.platform.quotas.metrics import MAX_RATE

UNITS = 60_000_000
"""Bucket units per request, token or load: the microseconds in a minute. A bucket gains `limit` units per microsecond.
"""


class CounterKey(NamedTuple):
    """Key of a policy's counter in one window, for the policy's subject or for a tenant with its own counter."""

    policy_id: str
    subject_id: str
    window_start_us: int
    """0 for a metric without windows."""


class Counter(NamedTuple):
    """The state of a counter. `reserved` and `used` are whole requests, tokens or nanos."""

    level: int
    """A bucket's level, in bucket units (see UNITS). It can be negative after a settlement."""
    reserved: int
    """Amount reserved by running requests."""
    used: int
    """Amount that settled requests have used in a budget's window."""
    exceeded: int
    """Number of times that a soft or shadow policy admitted or extended a request beyond its limit."""
    refilled_us: int

    @classmethod
    def fresh(cls, burst: int, now_us: int) -> Counter:
        # Only rates use the level. Policies of other kinds repeat the limit as the burst, which can then exceed the
        # largest bucket.
        return cls(min(burst, MAX_RATE) * UNITS, 0, 0, 0, now_us)

    def refilled(self, limit: int, burst: int, now_us: int) -> Counter:
        """Return the bucket at `now_us`.

        If the clock was set back by up to a minute, the bucket does not refill until the clock has caught up. If it was
        set back further, the bucket refills from `now_us` and loses the tokens gained during the time that now repeats.
        A change of the clock therefore never adds tokens.
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
        return Counter(
            self.level + level, self.reserved + reserved, self.used + used, self.exceeded + exceeded, self.refilled_us
        )

    @property
    def free_units(self) -> int:
        return self.level - self.reserved * UNITS

    def wait_us(self, cost: int, limit: int, now_us: int) -> int:
        """Return the microseconds until the bucket holds `cost` if nothing more is used. `limit` must be positive."""
        missing = cost * UNITS - self.free_units
        # If the clock was set back, the bucket does not refill until the clock has caught up.
        return -(-missing // limit) + self.refilled_us - now_us if missing > 0 else 0
