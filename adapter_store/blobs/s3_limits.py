"""Timeouts, retries and part sizes for the S3 blob store."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

MIN_PART_BYTES = 5 << 20
"""Smallest part size that S3 accepts, in bytes. Only the last part can be smaller."""
MAX_PARTS = 10_000
MAX_SINGLE_PUT_BYTES = 5 << 30
MAX_BLOB_BYTES = 5 << 40


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Limits:
    """Limits in seconds, bytes and counts. The defaults suit a store in the same region.

    A call without a body may take `call_s` in total, including retries and pauses. A call with a body may take `body_s`
    plus the time that the body takes at `min_bytes_per_s`. Listing all blobs or uploads may take `body_s`. Blobs larger
    than `part_bytes` are transferred in parts, `num_parallel` at a time, except as S3Writer describes.
    """

    connect_s: float = 2.0
    read_s: float = 5.0
    call_s: float = 15.0
    body_s: float = 30.0
    min_bytes_per_s: int = 4 << 20
    max_attempts: int = 4
    first_pause_s: float = 0.1
    max_pause_s: float = 2.0
    part_bytes: int = 16 << 20
    num_parallel: int = 4

    def __post_init__(self) -> None:
        if self.part_bytes < MIN_PART_BYTES:
            raise ValueError(f"part_bytes must be at least {MIN_PART_BYTES}")

    def body_deadline_s(self, num_bytes: int) -> float:
        return self.body_s + num_bytes / self.min_bytes_per_s


class Deadline:
    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begin = clock()
        self._seconds = seconds

    @property
    def remaining_s(self) -> float:
        return self._begin + self._seconds - self._clock()

    def extend(self, seconds: float) -> None:
        """Extend the deadline to `seconds` after the start, if that is later."""
        self._seconds = max(self._seconds, seconds)
