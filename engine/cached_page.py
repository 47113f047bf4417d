"""A page of the prefix cache, as the sequences that use it hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

COMPUTE_COST = 1.0
"""What computing one page of K and V again takes: the unit in which adapters state their cost."""


class PageCache(Protocol):
    """The cache that a page can be evicted from: `PrefixCache`."""

    num_evictions: int

    def forget(self, page: CachedPage) -> None:
        """Take a page out of the cache."""


@dataclass(slots=True, eq=False)
class CachedPage:
    """One full page, found by its key: a hash over everything that its K and V depend on."""

    cache: PageCache
    key: bytes
    page: int
    digest: str | None
    num_users: int = 0

    @property
    def num_pages(self) -> int:
        return 1

    @property
    def cost(self) -> float:
        return COMPUTE_COST

    @property
    def has_slot(self) -> bool:
        return False

    @property
    def is_waited_for(self) -> bool:
        """Nobody waits for a prefix: it can be computed."""
        return False

    def evict(self) -> None:
        self.cache.num_evictions += 1
        self.cache.forget(self)
