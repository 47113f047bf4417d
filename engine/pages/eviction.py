"""Evicts adapters and cached prefixes, in one common order, when pages are needed. Both can be restored later."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Protocol, runtime_checkable

from loramux.adapter_store.extensions import ExtensionKind, ExtensionRefused
from loramux.engine.pages.page_pool import PagePool
from loramux.engine.protocol.errors import ConfigNotUsable

AFTER_ALL = 1 << 62
"""Queue position after all waiting sequences."""

MOST_PINNED_SHARE = 0.9
"""Upper limit on `max_pinned_share`, because unpinned adapters and the KV cache need room as well."""

MAX_STALE = 1024
"""Number of outdated heap entries to tolerate, in addition to one per item."""


class Evictable(Protocol):
    """An idle adapter, or an unused page of a cached prefix."""

    @property
    def key(self) -> Hashable:
        """Identifies the content, even after the content has been evicted and restored."""
        ...

    @property
    def num_pages(self) -> int: ...

    @property
    def has_slot(self) -> bool:
        """True if the item occupies an adapter slot in addition to its pages."""
        ...

    @property
    def cost(self) -> float:
        """Cost of restoring the item, in the same unit for all items."""
        ...

    @property
    def is_waited_for(self) -> bool:
        """True if a waiting sequence or call needs the item. Only a sequence earlier in the queue can then evict it."""
        ...

    def evict(self) -> None:
        """Free the item's pages and discard its content."""
        ...


@runtime_checkable
class EvictionPolicy(Protocol):
    """Orders the evictable items. Called only by the thread that runs the engine's steps."""

    @property
    def num_pages(self) -> int:
        """Total number of pages of the evictable items."""
        ...

    def add(self, item: Evictable) -> None:
        """Add an item that has just become idle."""
        ...

    def discard(self, item: Evictable) -> None:
        """Remove an item, if present, because it is in use again or no longer exists."""
        ...

    def take(self, is_allowed: Callable[[Evictable], bool], slots_only: bool = False) -> Evictable | None:
        """Remove and return the first allowed item in eviction order, or None if no item is allowed. With `slots_only`,
        the item must have a slot.
        """
        ...


class LeastRecentlyUsed:
    """Evicts the item that has been idle longest."""

    def __init__(self) -> None:
        # In insertion order. Items with a slot are kept separately, so that finding a slot needs no scan over prefixes.
        self._items: dict[bool, OrderedDict[Evictable, int]] = {True: OrderedDict(), False: OrderedDict()}
        self._num_added = 0
        self.num_pages = 0

    def add(self, item: Evictable) -> None:
        self._num_added += 1
        self._items[item.has_slot][item] = self._num_added
        self.num_pages += item.num_pages

    def discard(self, item: Evictable) -> None:
        if self._items[item.has_slot].pop(item, None) is not None:
            self.num_pages -= item.num_pages

    def take(self, is_allowed: Callable[[Evictable], bool], slots_only: bool = False) -> Evictable | None:
        found: tuple[Evictable, int] | None = None
        for has_slot in (True,) if slots_only else (False, True):
            for item, number in self._items[has_slot].items():
                if found is not None and number > found[1]:
                    break
                if is_allowed(item):
                    found = item, number
                    break
        if found is None:
            return None
        self.discard(found[0])
        return found[0]


class GreedyDual:
    """GreedyDual-Size with frequencies (Cherkasova, 1998). First evicts items that are rarely used or cheap to restore.

    An item's priority is `clock + uses * cost / num_pages`. The clock is the highest priority of any item that `take`
    has returned, so items that are no longer used age. Use counts are kept for the `memory` most recently added keys.
    """

    def __init__(self, memory: int = 65536) -> None:
        self._clock = 0.0
        self.num_pages = 0
        self._num_added = 0
        self._memory = memory
        self._uses: OrderedDict[Hashable, int] = OrderedDict()
        # Items with a slot are kept separately, so that finding a slot needs no scan over prefixes.
        self._heaps: dict[bool, list[tuple[float, int, Evictable]]] = {True: [], False: []}
        # The number of each item's current heap entry. Entries with other numbers are outdated.
        self._current: dict[bool, dict[Evictable, int]] = {True: {}, False: {}}

    def add(self, item: Evictable) -> None:
        uses = self._uses.pop(item.key, 0) + 1
        self._uses[item.key] = uses
        if len(self._uses) > self._memory:
            self._uses.popitem(last=False)
        self._num_added += 1
        self.num_pages += item.num_pages
        current, heap = self._current[item.has_slot], self._heaps[item.has_slot]
        current[item] = self._num_added
        priority = self._clock + uses * item.cost / item.num_pages
        heapq.heappush(heap, (priority, self._num_added, item))
        if len(heap) > 2 * len(current) + MAX_STALE:
            heap[:] = [entry for entry in heap if current.get(entry[2]) == entry[1]]
            heapq.heapify(heap)

    def discard(self, item: Evictable) -> None:
        if self._current[item.has_slot].pop(item, None) is not None:
            self.num_pages -= item.num_pages

    def take(self, is_allowed: Callable[[Evictable], bool], slots_only: bool = False) -> Evictable | None:
        kinds = (True,) if slots_only else (True, False)
        firsts = [self._first(kind, is_allowed) for kind in kinds]
        found = min((first for first in firsts if first is not None), default=None)
        if found is None:
            return None
        priority, _, item = found
        self._clock = max(self._clock, priority)
        self.discard(item)
        return item

    def _first(self, has_slot: bool, is_allowed: Callable[[Evictable], bool]) -> tuple[float, int, Evictable] | None:
        heap, current = self._heaps[has_slot], self._current[has_slot]
        passed_over: list[tuple[float, int, Evictable]] = []
        found: tuple[float, int, Evictable] | None = None
        while heap and found is None:
            entry = heapq.heappop(heap)
            if current.get(entry[2]) != entry[1]:
                continue
            passed_over.append(entry)
            if is_allowed(entry[2]):
                found = entry
        # The item found stays in its heap, because the other heap's first item may have a lower priority.
        for entry in passed_over:
            heapq.heappush(heap, entry)
        return found


POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LeastRecentlyUsed, "greedy_dual": GreedyDual}

EVICTION_POLICIES = ExtensionKind[EvictionPolicy](
    "eviction_policies", "eviction policy", EvictionPolicy, taken=POLICIES.keys()
)
"""Policies of extensions. Each is called without arguments, once per engine."""


def policy_names() -> tuple[str, ...]:
    """Return the names that `new_policy` knows. Raises ExtensionRefused."""
    return (*POLICIES, *EVICTION_POLICIES.names)


def new_policy(name: str) -> EvictionPolicy:
    """Create the policy of this name. Raises ConfigNotUsable."""
    if name in POLICIES:
        return POLICIES[name]()
    try:
        return EVICTION_POLICIES.required(name)
    except ExtensionRefused as error:
        raise ConfigNotUsable(str(error)) from error


class WaitedFor(Protocol):
    """Reports the idle items that waiting sequences need, and the queue position at which each is first needed."""

    def num_pages_before(self, position: int) -> int:
        """Number of pages of idle items that sequences before `position` are waiting for."""
        ...

    def last_after(self, position: int) -> Evictable | None:
        """The idle item whose first waiting sequence is last in the queue, or None if no such sequence is after
        `position`.
        """
        ...


class Reclaimer:
    """Frees pages by evicting unused items, starting with items that no sequence is waiting for, in the policy's order.

    Items that a sequence is waiting for would soon have to be restored, so they are evicted last. Among them, the item
    needed last is evicted first.
    """

    def __init__(self, pages: PagePool, policy: EvictionPolicy, waited_for: WaitedFor | None = None) -> None:
        self._pages = pages
        self.policy = policy
        self._waited_for = waited_for

    def can_make_room(self, num_pages: int, position: int) -> bool:
        """True if `num_pages` pages are free or could be freed for a sequence at queue position `position`."""
        num_kept = 0 if self._waited_for is None else self._waited_for.num_pages_before(position)
        return self._pages.num_free + self.policy.num_pages - num_kept >= num_pages

    def make_room(self, num_pages: int, position: int) -> bool:
        """Evict until `num_pages` pages are free. If that is impossible, evict nothing and return False."""
        if self._pages.can_alloc(num_pages):
            return True
        if not self.can_make_room(num_pages, position):
            return False
        while not self._pages.can_alloc(num_pages):
            if not self.evict_one(position):
                return False
        return True

    def evict_one(self, position: int, slots_only: bool = False) -> bool:
        """Evict one item for a sequence at queue position `position`. Returns False if no item may be evicted."""
        item = self.policy.take(lambda one: not one.is_waited_for, slots_only)
        if item is None and self._waited_for is not None:
            # Sequences wait only for adapters, so the item has a slot.
            item = self._waited_for.last_after(position)
            if item is not None:
                self.policy.discard(item)
        if item is None:
            return False
        item.evict()
        return True
