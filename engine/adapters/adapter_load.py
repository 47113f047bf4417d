"""The record of one adapter on its way into the pool, or in it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from loramux.adapter_store.tiers.staged_adapter import StagedAdapter
from loramux.adapter_store.tiers.tier_figures import PassedStage

COPY_COST = 0.5
"""What copying one page of an adapter takes, beside computing one of K and V: a guess, for policies that ask."""


class AdapterPhase(Enum):
    REQUESTED = "requested"
    """The stager brings the adapter into host memory."""
    STAGED = "staged"
    """It lies in host memory; pages or a slot are still to be found."""
    COPYING = "copying"
    """It is copied into its pages."""
    RESIDENT = "resident"


class LoadOwner(Protocol):
    """The pool, as a load sees it."""

    def is_waited_for(self, load: AdapterLoad) -> bool: ...

    def forget(self, load: AdapterLoad) -> None: ...


@dataclass(slots=True, eq=False)
class AdapterLoad:
    """One digest in the pool. A slot and pages are held from COPYING on, host memory from STAGED until RESIDENT."""

    owner: LoadOwner
    digest: str
    phase: AdapterPhase = AdapterPhase.REQUESTED
    staged: StagedAdapter | None = None
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    num_pages: int = 0
    num_users: int = 0
    """Running sequences, and a pin; the adapter cannot be evicted while there are any."""
    evict_when_idle: bool = False
    """It is evicted as soon as nobody uses it."""
    is_pinned: bool = False
    """One of its users is no sequence, and keeps it."""
    failure: str | None = None
    """Why it did not become resident; the pool has forgotten it then."""
    used_s: float = 0.0
    """When it became resident, or a sequence last began or ended on it."""
    started_ns: int = field(default_factory=time.time_ns)
    """When it was requested, since 1970."""
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
        """Give up the hold on host memory, if there is one."""
        staged, self.staged = self.staged, None
        if staged is not None:
            staged.release()
