"""What gives way when pages are needed: one order over everything that could be had again."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol

from loramux.engine.page_pool import PagePool

LAST_RANK = 1 << 62
"""After the turns of all who wait."""

MAX_STALE = 1024
"""Entries of a heap that are out of date and may stay in it."""


class Evictable(Protocol):
    """Pages that nobody uses at the moment: an idle adapter, or a page of a prefix."""

    @property
    def key(self) -> Hashable:
        """The same for the same content, also after it was evicted and had again."""
        ...

    @property
    def num_pages(self) -> int: ...

    @property
    def cost(self) -> float:
        """What having it again takes, in any unit that all share."""
        ...

    def is_protected(self, rank: int) -> bool:
        """Whether it must stay because someone waits for it whose turn comes before `rank`."""
        ...

    def evict(self) -> None:
        """Give the pages back and forget the content."""
        ...


class EvictionPolicy(Protocol):
    """Orders what is evictable."""

    @property
    def num_pages(self) -> int:
        """Pages of all that is evictable."""
        ...

    def add(self, item: Evictable) -> None:
        """The item was in use until now."""
        ...

    def discard(self, item: Evictable) -> None:
        """The item is used again, or gone."""
        ...

    def take(self, is_allowed: Callable[[Evictable], bool]) -> Evictable | None:
        """Remove and return the first allowed item; None where there is none."""
        ...


class LeastRecentlyUsed:
    """The item that has been idle longest goes first."""

    def __init__(self) -> None:
        self._items: OrderedDict[Evictable, None] = OrderedDict()
        self.num_pages = 0

    def add(self, item: Evictable) -> None:
        self._items[item] = None
        self.num_pages += item.num_pages

    def discard(self, item: Evictable) -> None:
        if item in self._items:
            del self._items[item]
            self.num_pages -= item.num_pages

    def take(self, is_allowed: Callable[[Evictable], bool]) -> Evictable | None:
        for item in self._items:
            if is_allowed(item):
                self.discard(item)
                return item
        return None


class GreedyDual:
    """GreedyDual-Size with frequencies (Cherkasova, 1998): what is seldom used and cheap to have again goes first.

    An item's priority is `clock + uses * cost / num_pages`; the clock is the priority of the item evicted last, so
    that what was once worth much ages. Uses are remembered for the `memory` newest keys.
    """

    def __init__(self, memory: int = 65536) -> None:
        self._clock = 0.0
        self.num_pages = 0
        self._num_added = 0
        self._memory = memory
        self._uses: OrderedDict[Hashable, int] = OrderedDict()
        self._heap: list[tuple[float, int, Evictable]] = []
        # The number under which an item is in the heap; entries with other numbers are out of date.
        self._current: dict[Evictable, int] = {}

    def add(self, item: Evictable) -> None:
        uses = self._uses.pop(item.key, 0) + 1
        self._uses[item.key] = uses
        if len(self._uses) > self._memory:
            self._uses.popitem(last=False)
        self._num_added += 1
        self.num_pages += item.num_pages
        self._current[item] = self._num_added
        priority = self._clock + uses * item.cost / item.num_pages
        heapq.heappush(self._heap, (priority, self._num_added, item))
        if len(self._heap) > 2 * len(self._current) + MAX_STALE:
            self._heap = [entry for entry in self._heap if self._current.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, item: Evictable) -> None:
        if self._current.pop(item, None) is not None:
            self.num_pages -= item.num_pages

    def take(self, is_allowed: Callable[[Evictable], bool]) -> Evictable | None:
        passed_over: list[tuple[float, int, Evictable]] = []
        found: Evictable | None = None
        while self._heap and found is None:
            entry = heapq.heappop(self._heap)
            priority, number, item = entry
            if self._current.get(item) != number:
                continue
            if is_allowed(item):
                found = item
                self._clock = max(self._clock, priority)
                self.discard(item)
            else:
                passed_over.append(entry)
        for entry in passed_over:
            heapq.heappush(self._heap, entry)
        return found


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LeastRecentlyUsed, "greedy_dual": GreedyDual}


class Reclaimer:
    """Frees pages by evicting, in the policy's order, what nobody uses."""

    def __init__(self, pages: PagePool, policy: EvictionPolicy) -> None:
        self._pages = pages
        self.policy = policy
        self.num_protected: Callable[[int], int] = lambda rank: 0
        """Of the pages that are evictable, how many are protected from a rank; set by whoever protects some."""

    def make_room(self, num_pages: int, rank: int) -> bool:
        """Evict until `num_pages` are free, sparing what is protected from `rank`.

        False, and nothing evicted, when that is not enough.
        """
        if self._pages.can_alloc(num_pages):
            return True
        if self._pages.num_free + self.policy.num_pages - self.num_protected(rank) < num_pages:
            return False
        while not self._pages.can_alloc(num_pages):
            if not self.evict_one(rank):
                return False
        return True

    def evict_one(self, rank: int, is_allowed: Callable[[Evictable], bool] = lambda item: True) -> bool:
        """Evict the first allowed item that is not protected from `rank`; False where there is none.

        What somebody waits for, though his turn comes later, gives way last: it would only have to be had again.
        """
        item = self.policy.take(lambda one: is_allowed(one) and not one.is_protected(LAST_RANK))
        if item is None:
            item = self.policy.take(lambda one: is_allowed(one) and not one.is_protected(rank))
        if item is None:
            return False
        item.evict()
        return True
