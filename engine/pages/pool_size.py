"""The default size of the page pool. This module does not import torch."""

from __future__ import annotations

DEFAULT_BYTES = 1 << 30
"""Default size of a pool in host memory, in bytes."""


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB"
