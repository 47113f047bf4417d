"""Copies of evicted prefix pages in host memory: the second tier of the prefix cache."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import Protocol

from loramux.engine.protocol.messages import HostPageCounts
from loramux.engine.sequences.cached_page import CachedPage

MAX_SHARE = 2
"""In a full tier, an owner of `1 / MAX_SHARE` of the slots or more replaces only its own pages. All other owners
together therefore keep the rest, however many pages one owner fills.
"""

PART_OF_NEW = 0.2
"""Weight of a new measurement in the average time to compute a prompt's token."""


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


@dataclass(slots=True, eq=False)
class HostPage:
    """A copy of a page of the prefix cache, with the same key."""

    key: bytes
    slot: int
    digest: str | None
    owner: bytes


AnyPage = CachedPage | HostPage
"""A page of the prefix cache, in the pool or in host memory."""


class HostPages:
    """Copies of evicted pages by key, least recently used first.

    A copy stays when its page is restored, so that the page can be evicted again without being copied. The keys are
    those of the prefix cache, so a copy depends on the same isolation key, adapter, format and tokens as its page.
    """

    def __init__(self, memory: HostMemory | None = None) -> None:
        """Without `memory`, the tier is off and finds nothing."""
        self._memory: HostMemory = NoHostMemory() if memory is None else memory
        self._free = list(range(self._memory.num_slots - 1, -1, -1))
        # Both orders are the order of use. The second finds an owner's oldest page without a scan over other owners'.
        self._by_key: OrderedDict[bytes, HostPage] = OrderedDict()
        self._by_owner: defaultdict[bytes, OrderedDict[bytes, HostPage]] = defaultdict(OrderedDict)
        self._by_digest: defaultdict[str, set[bytes]] = defaultdict(set)
        self._token_s = 0.0
        self._num_saved = 0
        self._num_loaded = 0
        self._num_evictions = 0
        self._restored_tokens = 0
        self._recomputed_tokens = 0

    def __len__(self) -> int:
        return len(self._by_key)

    @property
    def num_slots(self) -> int:
        return self._memory.num_slots

    @property
    def free_slots(self) -> tuple[int, ...]:
        return tuple(self._free)

    def find(self, key: bytes) -> HostPage | None:
        return self._by_key.get(key)

    def save(self, cached: CachedPage) -> None:
        """Copy a page that the pool is about to evict, unless there is a copy already. If no slot can be freed, there
        will be no copy.
        """
        found = self._by_key.get(cached.key)
        if found is not None:
            self.touch(found)
            return
        if not self._free and not self._evict_for(cached.owner):
            return
        slot = self._free.pop()
        self._memory.save(cached.page, slot)
        self._num_saved += 1
        self._add(HostPage(cached.key, slot, cached.digest, cached.owner))

    def load(self, page: HostPage, target: int) -> None:
        """Copy a page back into the pool's page `target`."""
        self._memory.load(page.slot, target)
        self._num_loaded += 1

    def hold(self, page: HostPage) -> None:
        """Keep a page from being evicted until `put_back`. It is not found in the meantime."""
        assert self._by_key.get(page.key) is page
        self._remove(page)

    def put_back(self, page: HostPage) -> None:
        """End a `hold`. The page counts as just used."""
        assert page.key not in self._by_key
        self._add(page)

    def touch(self, page: HostPage) -> None:
        """Record that a page has been used until now."""
        self._by_key.move_to_end(page.key)
        self._by_owner[page.owner].move_to_end(page.key)

    def forget(self, key: bytes) -> None:
        """Delete a copy, if there is one."""
        page = self._by_key.get(key)
        if page is not None:
            self._remove(page)
            self._free.append(page.slot)

    def purge(self, digest: str) -> None:
        """Delete all copies that depend on an adapter."""
        for key in list(self._by_digest.get(digest, ())):
            self.forget(key)

    def purge_owners(self, owners: Iterable[bytes]) -> None:
        """Delete all copies of the pages of some owners."""
        for key in [key for owner in owners for key in self._by_owner.get(owner, ())]:
            self.forget(key)

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
        """Assert that each slot is free or has one page, and that the pages are listed alike everywhere."""
        slots = [*self._free, *(page.slot for page in self._by_key.values())]
        assert sorted(slots) == list(range(self.num_slots))
        assert sum(map(len, self._by_owner.values())) == len(self._by_key)
        with_digest = [page.key for page in self._by_key.values() if page.digest is not None]
        assert {key for keys in self._by_digest.values() for key in keys} == set(with_digest)

    def _evict_for(self, owner: bytes) -> bool:
        """Free a slot for a page of this owner. Returns False if all pages are held."""
        own = self._by_owner.get(owner)
        is_large = own is not None and MAX_SHARE * len(own) >= self.num_slots
        oldest = next(iter(own if own is not None and is_large else self._by_key), None)
        if oldest is None:
            return False
        self._num_evictions += 1
        self.forget(oldest)
        return True

    def _add(self, page: HostPage) -> None:
        self._by_key[page.key] = page
        self._by_owner[page.owner][page.key] = page
        if page.digest is not None:
            self._by_digest[page.digest].add(page.key)

    def _remove(self, page: HostPage) -> None:
        del self._by_key[page.key]
        own = self._by_owner[page.owner]
        del own[page.key]
        if not own:
            del self._by_owner[page.owner]
        if page.digest is not None:
            keys = self._by_digest[page.digest]
            keys.remove(page.key)
            if not keys:
                del self._by_digest[page.digest]
