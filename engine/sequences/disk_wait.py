"""What a waiting sequence expects from the disk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DiskWait:
    """Pages of the prefix cache that a sequence waits for, by key, until `until_s` at most. Without these pages, it
    would begin with `num_tokens` cached tokens. `beside` are the pages of its prefix that host memory has already.
    """

    keys: frozenset[bytes] = frozenset()
    until_s: float = 0.0
    num_tokens: int = 0
    beside: frozenset[bytes] = frozenset()


NO_WAIT = DiskWait()
