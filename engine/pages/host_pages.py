"""Copies of evicted prefix pages in host memory: the second tier of the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Protocol

from loramux.engine.pages.disk_pages import FIRST_WAIT_S, DiskPages
from loramux.engine.pages.page_index import MAX_SHARE, PageCopy, PageIndex
from loramux.engine.protocol.messages import HostPageCounts
from loramux.engine.sequences.cached_page import CachedPage
from loramux.engine.sequences.disk_wait import NO_WAIT, DiskWait

PART_OF_NEW = 0.2
"""Weight of a new measurement in the average time to compute a prompt's token."""

SPARE_PART = 8
"""With a disk tier, `1 / SPARE_PART` of the slots are free or being written to disk. New pages and pages from disk
therefore find a slot at once, unless the disk is too slow.
"""


class HostMemory(Protocol):
    """Slots of host memory, each for one page of the pool. Only the engine's thread calls it.

    The device runs copies and steps in the order in which they are submitted. A page that is being saved can therefore
    be freed at once: its next owner writes it in a later step, or after a fence that the copy precedes.
    """

    @property
    def num_slots(self) -> int: ...

    @property
    def load_s(self) -> float:
        """Measured time of `load`, in seconds."""
        ...

    def save(self, page: int, slot: int) -> None:
        """Copy a page to a slot, after the steps and copies submitted so far."""
        ...

    def load(self, slot: int, page: int) -> None:
        """Copy a slot to a page, before the steps and copies submitted later."""
        ...


class NoHostMemory:
    """The memory of a tier that is turned off."""

    num_slots = 0
    load_s = 0.0

    def save(self, page: int, slot: int) -> None:
        raise AssertionError("there is no slot")

    def load(self, slot: int, page: int) -> None:
        raise AssertionError("there is no slot")


AnyPage = CachedPage | PageCopy
"""A page of the prefix cache, in the pool or in host memory."""


class HostPages:
    """Copies of evicted pages by key, least recently used first.

    A copy stays when its page is restored, so that the page can be evicted again without being copied. `disk` keeps the
    pages that are evicted from here. They come back into slots of host memory before they are restored.
    """

    def __init__(self, memory: HostMemory | None = None, disk: DiskPages | None = None) -> None:
        """Without `memory`, the tier is off and finds nothing."""
        self._memory: HostMemory = NoHostMemory() if memory is None else memory
        self.disk = DiskPages() if disk is None else disk
        self._free = list(range(self._memory.num_slots - 1, -1, -1))
        self._num_spare = max(1, self.num_slots // SPARE_PART) if self.disk.is_on else 0
        self._index = PageIndex(self.num_slots)
        self._token_s = 0.0
        self._num_saved = 0
        self._num_loaded = 0
        self._num_evictions = 0
        self._restored_tokens = 0
        self._recomputed_tokens = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_slots(self) -> int:
        return self._memory.num_slots

    @property
    def free_slots(self) -> tuple[int, ...]:
        return tuple(self._free)

    @property
    def max_awaited(self) -> int:
        """Maximum number of pages in the prefixes of all sequences that wait for the disk: less than `1 / MAX_SHARE` of
        the slots. Room for a page from disk can therefore always be made, and never by evicting another page of theirs.
        """
        return max(0, self.num_slots // MAX_SHARE - 1)

    def find(self, key: bytes) -> PageCopy | None:
        return self._index.find(key)

    def owners(self) -> set[bytes]:
        """The owners of all copies, in host memory and on disk."""
        return {page.owner for page in self._index} | self.disk.owners()

    def save(self, cached: CachedPage) -> None:
        """Copy a page that the pool is about to evict, unless there is a copy already. If no slot can be freed, there
        will be no copy.
        """
        found = self.find(cached.key)
        if found is not None:
            self.touch(found)
            return
        if not self._free and not self._evict_for(cached.owner, to_disk=False):
            return
        slot = self._free.pop()
        self._memory.save(cached.page, slot)
        self._num_saved += 1
        self._index.add(PageCopy(cached.key, slot, cached.digest, cached.owner))
        self._keep_spare(cached.owner)

    def load(self, page: PageCopy, target: int) -> None:
        """Copy a page back into the pool's page `target`."""
        self._memory.load(page.slot, target)
        self._num_loaded += 1

    def fetch(self, pages: list[PageCopy], beside: list[PageCopy], num_tokens: int, num_more: int) -> DiskWait:
        """Have pages read from disk, if there is room for them (see `max_awaited`), and that is faster than computing
        the `num_more` tokens in them and in the pages `beside` them in host memory. Otherwise, return NO_WAIT.

        Without the pages, the sequence would begin with `num_tokens` cached tokens. It waits for at most as long as
        computing takes.
        """
        compute_s = num_more * self._token_s
        copy_s = (len(pages) + len(beside)) * self._memory.load_s
        is_slow = self._token_s and self.disk.read_s(len(pages)) + copy_s >= compute_s
        awaited = self.disk.awaited().union(page.key for page in (*pages, *beside))
        if is_slow or len(awaited) > self.max_awaited:
            self.disk.count_decision(0, num_more)
            return NO_WAIT
        # Pages of the same prefix must not be evicted to make room for its end.
        for page in reversed(beside):
            self.touch(page)
        self.disk.want(pages)
        wait = self.disk.wait_for(pages, beside, compute_s or FIRST_WAIT_S, num_tokens)
        self._start_reads()
        return wait

    def poll(self) -> None:
        """Take the pages that have come from disk since the last call, and the slots of those that are written."""
        if not self.disk.is_on:
            return
        for slot, page in self.disk.poll():
            if page is None or self.find(page.key) is not None:
                self._free.append(slot)
            else:
                self._index.add(PageCopy(page.key, slot, page.digest, page.owner))
        self._start_reads()

    def hold(self, page: PageCopy) -> None:
        """Keep a page from being evicted until `put_back`. It is not found in the meantime."""
        self._index.remove(page)

    def put_back(self, page: PageCopy) -> None:
        """End a `hold`. The page counts as just used."""
        self._index.add(page)

    def touch(self, page: PageCopy) -> None:
        """Record that a page has been used until now."""
        self._index.touch(page)

    def forget(self, key: bytes) -> None:
        """Delete a copy, if there is one, here and on disk."""
        page = self.find(key)
        if page is not None:
            self._drop(page)
        self.disk.forget(key)

    def purge(self, digest: str) -> None:
        """Delete all copies that depend on an adapter, here and on disk."""
        for page in self._index.with_digest(digest):
            self._drop(page)
        self.disk.purge(digest)

    def purge_owners(self, owners: Iterable[bytes]) -> None:
        """Delete all copies of the pages of some owners, here and on disk."""
        owners = list(owners)
        for page in self._index.of_owners(owners):
            self._drop(page)
        self.disk.purge_owners(owners)

    def pays(self, num_pages: int, num_tokens: int) -> bool:
        """True if copying `num_pages` pages is faster than computing the `num_tokens` tokens in them, by the measured
        times of both. As long as no prompt has been measured, copying is assumed to be faster.

        In a full pool, pages are evicted to make room for either, and saved. These saves are not counted, because
        computing the tokens needs at least as many new pages as copying them.
        """
        return not self._token_s or num_pages * self._memory.load_s < num_tokens * self._token_s

    def num_tokens_for(self, num_pages: int) -> int:
        """Number of a prompt's tokens that can be computed in the time in which `num_pages` pages are copied back. As
        long as no prompt has been measured, 0.
        """
        return ceil(num_pages * self._memory.load_s / self._token_s) if self._token_s else 0

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """Record how long a step took that computed this many tokens of prompts."""
        token_s = seconds / num_tokens
        self._token_s += (PART_OF_NEW if self._token_s else 1.0) * (token_s - self._token_s)

    def count_decision(self, restored_tokens: int, recomputed_tokens: int) -> None:
        """Count tokens with which a sequence began because they were copied back, and tokens that it computes although
        copies exist.
        """
        self._restored_tokens += restored_tokens
        self._recomputed_tokens += recomputed_tokens

    def counts(self) -> HostPageCounts:
        return HostPageCounts(
            num_slots=self.num_slots,
            num_pages=len(self),
            num_saved=self._num_saved,
            num_loaded=self._num_loaded,
            num_evictions=self._num_evictions,
            restored_tokens=self._restored_tokens,
            recomputed_tokens=self._recomputed_tokens,
        )

    def check_integrity(self) -> None:
        """Assert that each slot is free, has one page, or is being copied to or from the disk."""
        self._index.check_integrity()
        slots = [*self._free, *(page.slot for page in self._index), *self.disk.busy_host_slots]
        assert sorted(slots) == list(range(self.num_slots))
        self.disk.check_integrity()

    def _start_reads(self) -> None:
        while self._free and (page := self.disk.take_wanted()) is not None:
            if self.find(page.key) is None:
                self.disk.read(page, self._free.pop())
                self._keep_spare(page.owner)

    def _keep_spare(self, owner: bytes) -> None:
        """Evict pages to disk after a page of this owner has taken a slot: see SPARE_PART."""
        while len(self._free) + self.disk.num_writing < self._num_spare:
            if not self._evict_for(owner, to_disk=True):
                return

    def _evict_for(self, owner: bytes, *, to_disk: bool) -> bool:
        """Free a slot for a page of this owner, or begin to write its page to disk. Returns False if all pages are
        held.
        """
        oldest = self._index.oldest_for(owner)
        if oldest is None:
            return False
        self._num_evictions += 1
        self._index.remove(oldest)
        if to_disk and self.disk.write(oldest):
            return True
        if not to_disk:
            self.disk.count_lost(oldest)
        self._free.append(oldest.slot)
        return True

    def _drop(self, page: PageCopy) -> None:
        self._index.remove(page)
        self._free.append(page.slot)
