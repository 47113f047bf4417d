"""One page of the prefix cache, shared by the sequences that use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

COMPUTE_COST = 1.0
"""Cost of recomputing one KV page, the unit of all eviction costs."""


class PageCache(Protocol):
    """The cache that owns a page: `PrefixCache`."""

    def evict(self, page: CachedPage) -> None:
        """Remove a page from the pool's part of the cache, because its memory is needed."""


@dataclass(slots=True, eq=False)
class CachedPage:
    """One full page, or a page of a checkpoint. Its key contains a hash of everything that its content depends on.

    `owner` is the isolation key.
    """

    cache: PageCache
    key: bytes
    page: int
    digest: str | None
    owner: bytes
    num_users: int = 0
    num_pages: ClassVar[int] = 1
    cost: ClassVar[float] = COMPUTE_COST
    has_slot: ClassVar[bool] = False
    is_waited_for: ClassVar[bool] = False
    """False, because sequences recompute a missing prefix instead of waiting for it."""

    def evict(self) -> None:
        self.cache.evict(self)
