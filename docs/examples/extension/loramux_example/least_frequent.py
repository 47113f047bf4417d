"""An eviction policy that evicts the items with the fewest uses first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from loramux.engine.pages.eviction import Evictable


class LeastFrequentlyUsed:
    """Evicts the item that has been used least often. Among equals, the item that has been idle longest comes first.

    Use counts are kept for the `memory` most recently added keys, so an item that comes back keeps its count.
    """

    def __init__(self, memory: int = 65536) -> None:
        self.num_pages = 0
        self._memory = memory
        self._uses: OrderedDict[Hashable, int] = OrderedDict()
        self._num_added = 0
        # Items by number of uses, each with the number of its addition. Items with a slot are kept separately, so that
        # finding a slot needs no scan over prefixes.
        self._idle: dict[bool, dict[int, OrderedDict[Evictable, int]]] = {True: {}, False: {}}
        self._uses_of: dict[Evictable, int] = {}

    def add(self, item: Evictable) -> None:
        uses = self._uses.pop(item.key, 0) + 1
        self._uses[item.key] = uses
        if len(self._uses) > self._memory:
            self._uses.popitem(last=False)
        self._num_added += 1
        self._uses_of[item] = uses
        self._idle[item.has_slot].setdefault(uses, OrderedDict())[item] = self._num_added
        self.num_pages += item.num_pages

    def discard(self, item: Evictable) -> None:
        uses = self._uses_of.pop(item, None)
        if uses is None:
            return
        by_uses = self._idle[item.has_slot]
        del by_uses[uses][item]
        if not by_uses[uses]:
            del by_uses[uses]
        self.num_pages -= item.num_pages

    def take(self, is_allowed: Callable[[Evictable], bool], slots_only: bool = False) -> Evictable | None:
        kinds = (True,) if slots_only else (True, False)
        firsts = [first for kind in kinds if (first := self._first(kind, is_allowed)) is not None]
        if not firsts:
            return None
        _, _, item = min(firsts, key=lambda first: first[:2])
        self.discard(item)
        return item

    def _first(self, has_slot: bool, is_allowed: Callable[[Evictable], bool]) -> tuple[int, int, Evictable] | None:
        by_uses = self._idle[has_slot]
        for uses in sorted(by_uses):
            for item, number in by_uses[uses].items():
                if is_allowed(item):
                    return uses, number, item
        return None
