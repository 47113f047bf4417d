"""State of one adapter in the pool, from the request to load it until its eviction."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from loramux.adapter_store.tiers.staged_adapter import StagedAdapter
from loramux.adapter_store.tiers.tier_figures import PassedStage

COPY_COST = 0.5
"""Estimated cost of copying one adapter page, relative to recomputing one KV page."""


class AdapterPhase(Enum):
    REQUESTED = "requested"
    """The adapter waits to be loaded into host memory, or the stager is loading it."""
    STAGED = "staged"
    """The adapter is in host memory, waiting for pages and a slot."""
    COPYING = "copying"
    """The adapter is being copied into its pages."""
    RESIDENT = "resident"


class LoadOwner(Protocol):
    """The methods of `AdapterPool` that an AdapterLoad calls."""

    def is_waited_for(self, load: AdapterLoad) -> bool: ...

    def forget(self, load: AdapterLoad) -> None: ...


@dataclass(slots=True, eq=False)
class AdapterLoad:
    """One adapter in the pool. Holds a slot and pages from COPYING on, and host memory from STAGED until RESIDENT."""

    owner: LoadOwner
    digest: str
    phase: AdapterPhase = AdapterPhase.REQUESTED
    staged: StagedAdapter | None = None
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    num_bytes: int = 0
    """Bytes of host memory that the adapter takes while it is STAGED or COPYING, or 0 until it has been STAGED."""
    num_pages: int = 0
    vocab_size: int | None = None
    """Vocabulary size of the adapter, or None if it has the base's vocabulary. Known once the adapter is STAGED."""
    num_labels: int | None = None
    """Number of classes of a classifier, or None. Known once the adapter is STAGED."""
    num_users: int = 0
    """Number of running sequences that use the adapter, plus one if the adapter is pinned. An adapter with users cannot
    be evicted."""
    is_retired: bool = False
    """True if no new sequence can use this copy, because it has produced values that are not finite."""
    is_pinned: bool = False
    """True if one of the adapter's users is a pin."""
    failure: str | None = None
    """Reason why the load failed, or None. The pool has already removed a failed load."""
    used_s: float = 0.0
    """When the adapter last became resident, gained a user or lost its last user, on the pool's clock."""
    started_ns: int = field(default_factory=time.time_ns)
    """When the adapter was first wanted, in nanoseconds since 1970."""
    stages: list[PassedStage] = field(default_factory=list)

    @property
    def key(self) -> str:
        return self.digest

    @property
    def cost(self) -> float:
        return COPY_COST * self.num_pages

    @property
    def has_slot(self) -> bool:
        return True

    @property
    def is_waited_for(self) -> bool:
        return self.owner.is_waited_for(self)

    def evict(self) -> None:
        self.owner.forget(self)

    def release(self) -> None:
        """Release the adapter's host memory, if it holds any."""
        staged, self.staged = self.staged, None
        if staged is not None:
            staged.release()
