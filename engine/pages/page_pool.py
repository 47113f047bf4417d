"""Who owns each page of the pool: one free list for KV and adapters."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import IntEnum


class PageOwner(IntEnum):
    """Numbers, because they are hashed for every page: other members' hashes are computed in Python."""

    FREE = 0
    KV = 1
    ADAPTER = 2


# Finding a member takes as long as a call.
_FREE = PageOwner.FREE


class PagePool:
    """Hands out page ids in `[0, num_pages)`; the bytes themselves are elsewhere.

    A page has as many holders as `alloc` and `share` gave it, and is free once each has given it back. Pages that were
    freed longest ago are reused first, so that a bug which reads a freed page shows itself late and often rather than
    seldom.
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
        """Take `count` pages; the caller has asked `can_alloc`."""
        assert owner is not _FREE
        assert count >= 0
        assert self.can_alloc(count), f"{count} pages asked of {len(self._free)} free ones"
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._owners[page] = owner
            self._num_holders[page] = 1
        self._num_owned[owner] += count
        return pages

    def share(self, page: int) -> None:
        """Become one more holder of an owned page."""
        assert self._num_holders[page] > 0, f"page {page} is free and cannot be shared"
        self._num_holders[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back; each must be held."""
        for page in pages:
            owner = self._owners[page]
            assert owner is not _FREE, f"page {page} is freed twice"
            self._num_holders[page] -= 1
            if self._num_holders[page] == 0:
                self._owners[page] = _FREE
                self._num_owned[owner] -= 1
                self._free.append(page)

    def check_integrity(self) -> None:
        """Every page is free or held, never both and never twice."""
        free = list(self._free)
        assert len(free) == len(set(free))
        assert all(self._owners[page] is _FREE for page in free)
        assert len(free) + sum(self._num_owned.values()) == self.num_pages
        assert all(
            (count > 0) == (owner is not _FREE) for count, owner in zip(self._num_holders, self._owners, strict=True)
        )
