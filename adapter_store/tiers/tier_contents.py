"""Which adapters a bounded tier keeps, for operators who look."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LISTED = 2000
"""Adapters that are named of one tier, those used last: a look must not take long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAdapter:
    """One adapter in a tier."""

    digest: str
    num_bytes: int
    idle_s: float
    """Since its last use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierContents:
    """A tier's fill, and its adapters, the one used last first; of more than MAX_LISTED the rest are only counted."""

    tier: str
    used_bytes: int
    max_bytes: int
    num_adapters: int
    num_evictions: int
    adapters: tuple[KeptAdapter, ...]
