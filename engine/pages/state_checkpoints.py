"""Checkpoints of a hybrid decoder: copies of states in the prefix cache."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from loramux.engine.pages.host_pages import AnyPage
from loramux.engine.pages.page_index import PageCopy
from loramux.engine.pages.page_pool import PageOwner, PagePool
from loramux.engine.pages.prefix_cache import PrefixCache

CopyPage = Callable[[int, int], None]
"""Copies the first page to the second, after the steps that have been submitted."""

DISTANCE = 16
"""A prompt leaves a checkpoint before the last `1 / DISTANCE` of its full pages, rounded down, or before the last page.

The next prompt usually differs only in its last message. If the message is shorter than that, the next prompt starts
from the checkpoint and computes about `1 / DISTANCE` of its tokens.
"""

MIN_PAGES = 4
"""Minimum number of pages of K and V between the cached prefix with which a prompt starts and its first checkpoint, and
between its checkpoints. A checkpoint adds a step to a prompt and takes as many pages as a state, which pays only if it
saves enough computation.
"""


def checkpoint_pages(first: int, end: int, num_known: int, num_base: int = 0) -> list[int]:
    """After how many of its pages of K and V a sequence leaves checkpoints, in ascending order.

    The sequence starts with a cached prefix of `first` pages, and other sequences can share up to `end` pages with it.
    K and V of its first `num_known` pages are already cached. It differs from an earlier prompt after these pages, and
    so may later prompts. The base computes its first `num_base` pages, which other adapters can share.
    """
    planned: list[int] = []
    for page in sorted((num_known, num_base, end - max(1, end // DISTANCE))):
        if page >= (planned[-1] if planned else first) + MIN_PAGES:
            planned.append(page)
    return planned


class StateCheckpoints:
    """Saves and restores states.

    The pages of a checkpoint are entries of the prefix cache of their own, with keys that extend the key of the page of
    K and V before the checkpoint. A checkpoint therefore depends on the same isolation key, adapter and tokens as this
    page. Its pages are evicted in the same order as all others, and some of them can be in the pool and others in host
    memory. A checkpoint that lacks a page is not used.
    """

    def __init__(self, pages: PagePool, cache: PrefixCache, num_pages: int, copy_page: CopyPage) -> None:
        """A state takes `num_pages` pages."""
        self._pages = pages
        self._cache = cache
        self._num_pages = num_pages
        self._copy_page = copy_page

    def find(self, key: bytes, find_page: Callable[[bytes], AnyPage | None]) -> tuple[AnyPage, ...]:
        """The pages of the checkpoint after the page of K and V with this key. Empty if there is no checkpoint.

        `find_page` is a method of the prefix cache.
        """
        found: list[AnyPage] = []
        for index in range(self._num_pages):
            page = find_page(_key(key, index))
            if page is None:
                return ()
            found.append(page)
        return tuple(found)

    def save(self, key: bytes, digest: str | None, owner: bytes, state_pages: array[int]) -> bool:
        """Copy a sequence's state into a checkpoint, unless there is one already. `digest` is that of the adapter on
        which the state depends, and `owner` the sequence's isolation key.

        Returns False if there is no room: see `PrefixCache.make_room`.
        """
        if self.find(key, self._cache.find_anywhere):
            return True
        # The rest of an incomplete checkpoint comes from another computation, and rounding can differ between the two.
        self.forget(key)
        if not self._cache.make_room(self._num_pages):
            return False
        targets = self._pages.alloc(self._num_pages, PageOwner.KV)
        for index, (source, target) in enumerate(zip(state_pages, targets, strict=True)):
            self._copy_page(source, target)
            cached = self._cache.insert(_key(key, index), target, digest, owner)
            assert cached is not None
            self._cache.release(cached)
        self._pages.free(targets)
        return True

    def acquire(self, checkpoint: tuple[AnyPage, ...]) -> None:
        """Keep a checkpoint from being evicted until it is restored."""
        for page in checkpoint:
            if isinstance(page, PageCopy):
                self._cache.host.hold(page)
            else:
                self._cache.acquire(page)

    def restore(self, checkpoint: tuple[AnyPage, ...], state_pages: array[int]) -> None:
        """Copy an acquired checkpoint into a sequence's state, and release it."""
        for page, target in zip(checkpoint, state_pages, strict=True):
            if isinstance(page, PageCopy):
                self._cache.host.load(page, target)
            else:
                self._copy_page(page.page, target)
        self._release(checkpoint)

    def touch(self, key: bytes) -> None:
        """Record that a checkpoint, if it is still complete, has been used until now."""
        checkpoint = self.find(key, self._cache.find_anywhere)
        self.acquire(checkpoint)
        self._release(checkpoint)

    def forget(self, key: bytes) -> None:
        """Remove a checkpoint, even an incomplete one, from the cache."""
        for index in range(self._num_pages):
            self._cache.forget(_key(key, index))

    def _release(self, checkpoint: tuple[AnyPage, ...]) -> None:
        for page in checkpoint:
            if isinstance(page, PageCopy):
                self._cache.host.put_back(page)
            else:
                self._cache.release(page)
                self._pages.free([page.page])


def _key(key: bytes, index: int) -> bytes:
    """Key of a page of a checkpoint. It is longer than the keys of pages of K and V, so it equals none of them."""
    return key + b"state" + index.to_bytes(4, "little")
