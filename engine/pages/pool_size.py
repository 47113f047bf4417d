"""The default size of the page pool, and the memory that is free. This module does not import torch."""

from __future__ import annotations

from pathlib import Path

DEFAULT_BYTES = 1 << 30
"""Default size of a pool in host memory, in bytes."""


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"


def free_memory() -> int:
    """Linux's `MemAvailable`, in bytes."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
