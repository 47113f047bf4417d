"""The adapters that a bounded tier holds, for operators."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LISTED = 2000
"""Most adapters listed per tier, most recently used first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAdapter:
    """One adapter in a tier."""

    digest: str
    num_bytes: int
    idle_s: float
    """Seconds since its last use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierContents:
    """How full a tier is, and its adapters, most recently used first; beyond MAX_LISTED they are only counted."""

    tier: str
    used_bytes: int
    max_bytes: int
    num_adapters: int
    num_evictions: int
    adapters: tuple[KeptAdapter, ...]
