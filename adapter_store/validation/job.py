"""What crosses between the server and the validation process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loramux.adapter_store.formats.pack_target import PackTarget

_OWN_MEMORY_BYTES = 512 << 20
"""What Python, numpy and the work on one tensor may take besides the inputs: 142 MB of it before the first one."""

_OWN_FILE_BYTES = 16 << 20
MIN_TIME_S = 10.0
BYTES_PER_S = 20 << 20
"""What is read and written beyond the first `MIN_TIME_S * BYTES_PER_S` has time at this rate, less than a sixth of what
a core was measured to do: see the figures in README.md."""


WALL_PER_TIME = 10.0
"""Longest duration of a validation, in multiples of its processor time: it yields the processor to others."""


@dataclass(frozen=True, slots=True)
class ValidationJob:
    """Files of one upload, and where to put what becomes of them."""

    config: Path
    tensors: Path
    canonical: Path
    packed: Path


@dataclass(frozen=True, slots=True)
class Accepted:
    """An upload that passed; its canonical and packed files are written."""

    digest: str
    max_rank: int
    num_pages: int
    report: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one validation process."""

    memory_bytes: int
    file_bytes: int
    time_s: float
    """Of the processor."""

    @property
    def wall_s(self) -> float:
        return WALL_PER_TIME * self.time_s

    @classmethod
    def for_upload(cls, target: PackTarget, tensors_bytes: int) -> Limits:
        """Enough for the largest valid adapter of the target's base, and 10 s for one of `tensors_bytes`.

        Memory holds either the pages or a part of the file, so one of the two bounds it. An upload that is large is
        given longer, by its own size: a small file buys no time.
        """
        largest = max(target.max_payload_bytes, target.max_tensors_bytes)
        # A file of one layer becomes pages of all: each layer has as many as the longest.
        pages_bytes = min(target.max_payload_bytes, 2 * target.geometry.num_layers * tensors_bytes)
        time_s = max(MIN_TIME_S, (tensors_bytes + pages_bytes) / BYTES_PER_S)
        return cls(_OWN_MEMORY_BYTES + largest, _OWN_FILE_BYTES + largest, time_s)
