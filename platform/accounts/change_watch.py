"""How long a cache may trust what it has read from a database that announces changes."""

from __future__ import annotations

MAX_STALE_US = 5_000_000
"""How long a cached value is trusted without hearing from the database, in microseconds."""

MAX_AGE_US = 600_000_000
"""How long a cached value is used at most, in microseconds. The database announces no changes that bypass its triggers,
such as a restore with `--disable-triggers`.
"""

_SPREAD = 7919
"""A prime. Values that were read within a second expire at times spread over half of MAX_AGE_US."""


class ChangeWatch:
    """What `CacheInvalidation` has told a cache. The cache must drop all values at a change and call `note_change`.

    A value that was read before the last change may be outdated, although it was not yet cached when the change was
    noted. So a cache reads `num_changes` before the database, and keeps the value only if the number is still the same.
    """

    def __init__(self) -> None:
        self.num_changes = 0
        self._confirmed_us = 0

    def note_change(self) -> None:
        self.num_changes += 1

    def confirm(self, now_us: int) -> None:
        """Note that nothing had changed at this time since the last `note_change`."""
        self._confirmed_us = now_us

    def is_fresh(self, read_us: int, now_us: int, max_stale_us: int = MAX_STALE_US) -> bool:
        """True if a value that was read at `read_us`, or that was still right at the last `confirm`, can be used."""
        since_us = self._confirmed_us if read_us <= self._confirmed_us <= now_us else read_us
        # If all values expired together, a busy gateway would read thousands of them at once.
        max_age_us = MAX_AGE_US // 2 + read_us * _SPREAD % (MAX_AGE_US // 2)
        # Setting the clock back must not extend a value's life.
        return read_us <= now_us < min(since_us + max_stale_us, read_us + max_age_us)
