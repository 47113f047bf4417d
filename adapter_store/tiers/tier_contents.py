"""The adapters that a bounded tier holds, for operators."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LISTED = 2000
"""Maximum number of adapters listed per tier, most recently used first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAdapter:
    """One adapter in a tier."""

    digest: str
    num_bytes: int
    idle_s: float
    """Seconds since the adapter's last use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierContents:
    """How full a tier is, and its adapters, most recently used first; at most MAX_LISTED are listed."""

    tier: str
    used_bytes: int
    max_bytes: int
    num_adapters: int
    num_evictions: int
    adapters: tuple[KeptAdapter, ...]
