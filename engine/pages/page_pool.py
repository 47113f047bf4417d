"""Ownership of the pool's pages: one free list for KV and adapters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import IntEnum


class PageOwner(IntEnum):
    """What a page is used for.

    This is an IntEnum because owners are hashed for every page, and other enums hash in Python code.
    """

    FREE = 0
    KV = 1
    ADAPTER = 2


# Look up the enum member once, because the lookup takes as long as a function call.
_FREE = PageOwner.FREE


class PagePool:
    """Hands out page ids in `[0, num_pages)`. The memory itself is elsewhere.

    `alloc` gives a page its first holder, and `share` adds another. A page becomes free once every holder has freed it.
    The page freed longest ago is reused first.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free: deque[int] = deque(range(num_pages))
        self._owners = [_FREE] * num_pages
        self._num_holders = [0] * num_pages
        self._num_owned = {PageOwner.KV: 0, PageOwner.ADAPTER: 0}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_owned(self, owner: PageOwner) -> int:
        return self._num_owned[owner]

    def can_alloc(self, count: int) -> bool:
        return count <= len(self._free)

    def alloc(self, count: int, owner: PageOwner) -> list[int]:
        """Allocate `count` pages. The caller must have checked `can_alloc`."""
        assert owner is not _FREE
        assert count >= 0
        assert self.can_alloc(count), f"{count} pages requested, {len(self._free)} are free"
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._owners[page] = owner
            self._num_holders[page] = 1
        self._num_owned[owner] += count
        return pages

    def share(self, page: int) -> None:
        assert self._num_holders[page] > 0, f"page {page} is free and cannot be shared"
        self._num_holders[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Remove one holder from each page. Every page must have a holder."""
        for page in pages:
            owner = self._owners[page]
            assert owner is not _FREE, f"page {page} is freed twice"
            self._num_holders[page] -= 1
            if self._num_holders[page] == 0:
                self._owners[page] = _FREE
                self._num_owned[owner] -= 1
                self._free.append(page)

    def check_integrity(self) -> None:
        """Assert that each page is either free or has a holder, and that no page is listed as free twice."""
        free = list(self._free)
        assert len(free) == len(set(free))
        assert all(self._owners[page] is _FREE for page in free)
        assert len(free) + sum(self._num_owned.values()) == self.num_pages
        assert all(
            (count > 0) == (owner is not _FREE) for count, owner in zip(self._num_holders, self._owners, strict=True)
        )
