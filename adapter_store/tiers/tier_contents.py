"""Lists the adapters in a bounded tier, for operators."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LISTED = 2000
"""Maximum number of adapters listed per tier, most recently used first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAdapter:
    digest: str
    num_bytes: int
    idle_s: float
    """Seconds since the adapter's last use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierContents:
    """A tier's capacity and usage, and up to MAX_LISTED of its adapters, most recently used first."""

    tier: str
    used_bytes: int
    max_bytes: int
    num_adapters: int
    num_evictions: int
    adapters: tuple[KeptAdapter, ...]
