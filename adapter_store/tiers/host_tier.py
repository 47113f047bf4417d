"""A bounded LRU tier of packed adapters in host memory, with a protected minimum, or floor, for groups of adapters."""

from __future__ import annotations

import heapq
import itertools
import time
from bisect import bisect_left, insort
from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.adapter_store.tiers.tier_contents import MAX_LISTED, KeptAdapter, TierContents
from loramux.adapter_store.tiers.tier_figures import Held, Tier

_turn_of = attrgetter("turn")


@dataclass(slots=True, eq=False)
class _Entry:
    """An adapter. `turn` is the number of its last use."""

    packed: PackedAdapter
    num_leases: int
    used_s: float
    turn: int

    @property
    def digest(self) -> str:
        return self.packed.digest

    @property
    def num_bytes(self) -> int:
        return self.packed.payload.nbytes


@dataclass(slots=True, eq=False)
class _Group:
    digests: frozenset[str] = frozenset()
    floor_bytes: int = 0
    used_bytes: int = 0


class HostTier:
    """Packed adapters in host memory. Use it from one thread only.

    Leased adapters are never evicted, even if the tier exceeds `max_bytes`. That bound takes precedence over the
    floors, but an unleased adapter that a floor protects is evicted only if no other adapter can be evicted.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: dict[str, _Entry] = {}
        # The entries without leases: those that a floor protected when they were last looked at, and all others, least
        # recently used first. Thousands of floors therefore do not make each eviction look at all protected entries.
        self._protected: dict[str, _Entry] = {}
        self._evictable: list[_Entry] = []
        self._turns = itertools.count()
        self._groups: dict[str, _Group] = {}
        self._groups_of: dict[str, list[_Group]] = {}
        self._floor_bytes = 0
        self._reserved_bytes = 0
        self.used_bytes = 0
        self.num_evictions = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    def lease(self, digest: str) -> PackedAdapter | None:
        entry = self._entries.get(digest)
        if entry is None:
            return None
        if not entry.num_leases:
            self._take_out(entry)
        entry.num_leases += 1
        entry.used_s, entry.turn = time.monotonic(), next(self._turns)
        return entry.packed

    def reserve(self, num_bytes: int) -> None:
        """Reserve room for adapters that are being loaded, in place of the previous reservation.

        Their memory is in use during the load, before `add` counts it.
        """
        self._reserved_bytes = num_bytes
        self._evict()

    def add(self, packed: PackedAdapter, num_leases: int) -> None:
        assert packed.digest not in self._entries
        entry = self._entries[packed.digest] = _Entry(packed, num_leases, time.monotonic(), next(self._turns))
        if not num_leases:
            self._evictable.append(entry)
        self._count(entry, entry.num_bytes)
        self._evict()

    def release(self, digest: str) -> None:
        entry = self._entries[digest]
        assert entry.num_leases > 0
        entry.num_leases -= 1
        if not entry.num_leases:
            insort(self._evictable, entry, key=_turn_of)
        self._evict()

    def forget(self, digest: str) -> None:
        """Remove an adapter, unless it is leased."""
        entry = self._entries.get(digest)
        if entry is not None and entry.num_leases == 0:
            self._remove(entry)

    def protect(self, group: str, digests: Collection[str], floor_bytes: int) -> int:
        """Keep up to `floor_bytes` of these adapters from being evicted in favour of other adapters.

        Within a group, the least recently used adapters can still be evicted as long as the rest fills the floor.
        Replaces the group's previous floor. A floor of 0 removes it. Returns by how many bytes all floors together
        would exceed the tier. If it is not 0, nothing is changed. Raises ValueError if the floor is negative.
        """
        changed = self._groups.get(group) or _Group()
        total = self._floor_bytes - changed.floor_bytes + floor_bytes
        if floor_bytes < 0:
            raise ValueError("a floor must not be negative")
        if total > self.max_bytes:
            return total - self.max_bytes
        self._floor_bytes = total
        members = frozenset(digests) if floor_bytes else frozenset()
        former = changed.digests
        for digest in former - members:
            self._groups_of[digest].remove(changed)
            if not self._groups_of[digest]:
                del self._groups_of[digest]
            changed.used_bytes -= self._num_bytes(digest)
        for digest in members - former:
            self._groups_of.setdefault(digest, []).append(changed)
            changed.used_bytes += self._num_bytes(digest)
        changed.digests, changed.floor_bytes = members, floor_bytes
        if floor_bytes:
            self._groups[group] = changed
        else:
            self._groups.pop(group, None)
        self._look_again(former)
        return 0

    def held(self) -> dict[Tier, Held]:
        """Return the bytes in use and the number of evictions, for `TierFigures`."""
        return {"host": Held(self.used_bytes, self.num_evictions)}

    def contents(self) -> TierContents:
        now_s = time.monotonic()
        newest = heapq.nlargest(MAX_LISTED, self._entries.values(), key=_turn_of)
        return TierContents(
            tier="host",
            used_bytes=self.used_bytes,
            max_bytes=self.max_bytes,
            num_adapters=len(self._entries),
            num_evictions=self.num_evictions,
            adapters=tuple(
                KeptAdapter(digest=entry.digest, num_bytes=entry.num_bytes, idle_s=now_s - entry.used_s)
                for entry in newest
            ),
        )

    def _num_bytes(self, digest: str) -> int:
        entry = self._entries.get(digest)
        return 0 if entry is None else entry.num_bytes

    def _count(self, entry: _Entry, num_bytes: int) -> None:
        self.used_bytes += num_bytes
        for group in self._groups_of.get(entry.digest, ()):
            group.used_bytes += num_bytes
            if num_bytes > 0 and group.used_bytes > group.floor_bytes:
                # Older adapters of the group may be evictable now.
                self._look_again(group.digests)

    def _remove(self, entry: _Entry) -> None:
        self._take_out(entry)
        del self._entries[entry.digest]
        self._count(entry, -entry.num_bytes)

    def _take_out(self, entry: _Entry) -> None:
        if self._protected.pop(entry.digest, None) is None:
            del self._evictable[bisect_left(self._evictable, entry.turn, key=_turn_of)]

    def _look_again(self, digests: frozenset[str]) -> None:
        """Find out which of the protected adapters among these are no longer protected."""
        for digest in self._protected.keys() & digests:
            entry = self._protected[digest]
            if not self._is_protected(entry):
                del self._protected[digest]
                insort(self._evictable, entry, key=_turn_of)

    def _evict(self) -> None:
        while self.used_bytes + self._reserved_bytes > self.max_bytes:
            num_protected = sum(1 for _ in itertools.takewhile(self._is_protected, self._evictable))
            self._protected.update((entry.digest, entry) for entry in self._evictable[:num_protected])
            del self._evictable[:num_protected]
            if self._evictable:
                self._remove(self._evictable[0])
            elif self._protected:
                self._remove(min(self._protected.values(), key=_turn_of))
            else:
                break
            self.num_evictions += 1

    def _is_protected(self, entry: _Entry) -> bool:
        groups = self._groups_of.get(entry.digest, ())
        return any(group.used_bytes - entry.num_bytes < group.floor_bytes for group in groups)
