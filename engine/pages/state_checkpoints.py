"""Checkpoints of a hybrid decoder: copies of states in the prefix cache."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from loramux.engine.pages.eviction import AFTER_ALL, Reclaimer
from loramux.engine.pages.page_pool import PageOwner, PagePool
from loramux.engine.pages.prefix_cache import PrefixCache
from loramux.engine.sequences.cached_page import CachedPage

CopyPage = Callable[[int, int], None]
"""Copies the first page to the second, after the steps that have been submitted."""

PAGES_BEFORE_END = (0, 1, 3, 7)
"""Numbers of pages between a prompt's checkpoints and the end of its last full page.

The next prompt usually differs only in its last message, whose length is not known in advance. With distances that
double, the part that is computed again is at most about as long as the part that differs.
"""

MIN_PAGES = 4
"""Minimum number of pages of K and V between the cached prefix with which a prompt starts and its checkpoints. A
checkpoint adds a step to a prompt and takes as many pages as a state, which pays only if it saves enough computation.
"""


def checkpoint_pages(first: int, end: int, num_known: int) -> list[int]:
    """After how many of its pages of K and V a sequence leaves checkpoints, in ascending order.

    The sequence starts with a cached prefix of `first` pages, and other sequences can share up to `end` pages with it.
    K and V of its first `num_known` pages are already cached. It differs from an earlier prompt after these pages, and
    so may later prompts.
    """
    wanted = {num_known, *(end - distance for distance in PAGES_BEFORE_END)}
    return sorted(page for page in wanted if page >= first + MIN_PAGES)


class StateCheckpoints:
    """Saves and restores states.

    The pages of a checkpoint are entries of the prefix cache of their own, with keys that extend the key of the page of
    K and V before the checkpoint. A checkpoint therefore depends on the same isolation key, adapter and tokens as this
    page. Its pages are evicted in the same order as all others, and a checkpoint that lacks a page is not used.
    """

    def __init__(
        self, pages: PagePool, reclaimer: Reclaimer, cache: PrefixCache, num_pages: int, copy_page: CopyPage
    ) -> None:
        """A state takes `num_pages` pages."""
        self._pages = pages
        self._reclaimer = reclaimer
        self._cache = cache
        self._num_pages = num_pages
        self._copy_page = copy_page

    def find(self, key: bytes) -> tuple[CachedPage, ...]:
        """The pages of the checkpoint after the page of K and V with this key. Empty if there is no checkpoint."""
        found: list[CachedPage] = []
        for index in range(self._num_pages):
            cached = self._cache.find(_key(key, index))
            if cached is None:
                return ()
            found.append(cached)
        return tuple(found)

    def save(self, key: bytes, digest: str | None, state_pages: array[int]) -> bool:
        """Copy a sequence's state into a checkpoint, unless there is one already. `digest` is that of the adapter on
        which the state depends.

        Returns False if the copy needs pages that are in use or that waiting sequences need.
        """
        if self.find(key):
            return True
        if not self._reclaimer.make_room(self._num_pages, AFTER_ALL):
            return False
        targets = self._pages.alloc(self._num_pages, PageOwner.KV)
        for index, (source, target) in enumerate(zip(state_pages, targets, strict=True)):
            cached = self._cache.insert(_key(key, index), target, digest)
            # Other pages of an incomplete checkpoint with this key may still be cached.
            if cached is not None:
                self._copy_page(source, target)
                self._cache.release(cached)
        self._pages.free(targets)
        return True

    def acquire(self, checkpoint: tuple[CachedPage, ...]) -> None:
        """Keep a checkpoint from being evicted until it is restored."""
        for cached in checkpoint:
            self._cache.acquire(cached)

    def restore(self, checkpoint: tuple[CachedPage, ...], state_pages: array[int]) -> None:
        """Copy an acquired checkpoint into a sequence's state, and release it."""
        for cached, target in zip(checkpoint, state_pages, strict=True):
            self._copy_page(cached.page, target)
            self._cache.release(cached)
            self._pages.free([cached.page])

    def forget(self, key: bytes) -> None:
        """Remove a checkpoint, even an incomplete one, from the cache."""
        for index in range(self._num_pages):
            cached = self._cache.find(_key(key, index))
            if cached is not None:
                self._cache.forget(cached)


def _key(key: bytes, index: int) -> bytes:
    """Key of a page of a checkpoint. It is longer than the keys of pages of K and V, so it equals none of them."""
    return key + b"state" + index.to_bytes(4, "little")
