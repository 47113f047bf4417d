"""A bounded LRU tier of packed adapters in host memory, with a protected minimum, or floor, for groups of adapters."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice

from loramux.adapter_store.formats.packed.packing import PackedAdapter
from loramux.adapter_store.tiers.tier_contents import MAX_LISTED, KeptAdapter, TierContents
from loramux.adapter_store.tiers.tier_figures import Held, Tier


@dataclass(slots=True)
class _Entry:
    packed: PackedAdapter
    num_leases: int
    used_s: float

    @property
    def num_bytes(self) -> int:
        return self.packed.payload.nbytes


@dataclass(slots=True)
class _Group:
    digests: frozenset[str]
    floor_bytes: int
    used_bytes: int = 0


class HostTier:
    """Packed adapters in host memory. Use it from one thread only.

    Leased adapters are never evicted, even if the tier exceeds `max_bytes`. That bound takes precedence over the
    floors, but an unleased adapter that a floor protects is evicted only if no other adapter can be evicted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._groups: dict[str, _Group] = {}
        self._reserved_bytes = 0
        self.used_bytes = 0
        self.num_evictions = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    def lease(self, digest: str) -> PackedAdapter | None:
        entry = self._entries.get(digest)
        if entry is None:
            return None
        entry.num_leases += 1
        entry.used_s = time.monotonic()
        self._entries.move_to_end(digest)
        return entry.packed

    def reserve(self, num_bytes: int) -> None:
        """Reserve room for adapters that are being loaded, in place of the previous reservation.

        Their memory is in use during the load, before `add` counts it.
        """
        self._reserved_bytes = num_bytes
        self._evict()

    def add(self, packed: PackedAdapter, num_leases: int) -> None:
        assert packed.digest not in self._entries
        self._entries[packed.digest] = _Entry(packed, num_leases, time.monotonic())
        self._count(packed.digest, packed.payload.nbytes)
        self._evict()

    def release(self, digest: str) -> None:
        entry = self._entries[digest]
        assert entry.num_leases > 0
        entry.num_leases -= 1
        self._evict()

    def forget(self, digest: str) -> None:
        """Remove an adapter, unless it is leased."""
        entry = self._entries.get(digest)
        if entry is not None and entry.num_leases == 0:
            self._count(digest, -self._entries.pop(digest).num_bytes)

    def protect(self, group: str, digests: Collection[str], floor_bytes: int) -> None:
        """Keep up to `floor_bytes` of these adapters from being evicted in favour of other adapters.

        Within a group, the least recently used adapters can still be evicted as long as the rest fills the floor.
        Replaces the group's previous floor. A floor of 0 removes it. Raises ValueError, and changes nothing, if the
        floor is negative or all floors together exceed the tier.
        """
        others = sum(one.floor_bytes for name, one in self._groups.items() if name != group)
        if floor_bytes < 0 or others + floor_bytes > self._max_bytes:
            raise ValueError(f"floors of {others + floor_bytes} bytes do not fit into {self._max_bytes}")
        if not floor_bytes:
            self._groups.pop(group, None)
            return
        members = frozenset(digests)
        used = sum(entry.num_bytes for digest, entry in self._entries.items() if digest in members)
        self._groups[group] = _Group(members, floor_bytes, used)

    def held(self) -> dict[Tier, Held]:
        """Return the bytes in use and the number of evictions, for `TierFigures`."""
        return {"host": Held(self.used_bytes, self.num_evictions)}

    def contents(self) -> TierContents:
        now_s = time.monotonic()
        newest = islice(reversed(self._entries.items()), MAX_LISTED)
        return TierContents(
            tier="host",
            used_bytes=self.used_bytes,
            max_bytes=self._max_bytes,
            num_adapters=len(self._entries),
            num_evictions=self.num_evictions,
            adapters=tuple(
                KeptAdapter(digest=digest, num_bytes=entry.num_bytes, idle_s=now_s - entry.used_s)
                for digest, entry in newest
            ),
        )

    def _count(self, digest: str, num_bytes: int) -> None:
        self.used_bytes += num_bytes
        for group in self._groups.values():
            if digest in group.digests:
                group.used_bytes += num_bytes

    def _evict(self) -> None:
        for minds_floors in (True, False):
            while self.used_bytes + self._reserved_bytes > self._max_bytes:
                digest = self._victim(minds_floors)
                if digest is None:
                    break
                self._count(digest, -self._entries.pop(digest).num_bytes)
                self.num_evictions += 1

    def _victim(self, minds_floors: bool) -> str | None:
        # Few adapters are leased, and all of them were used recently, so without floors the search ends quickly.
        for digest, entry in self._entries.items():
            if entry.num_leases == 0 and not (minds_floors and self._is_protected(digest, entry.num_bytes)):
                return digest
        return None

    def _is_protected(self, digest: str, num_bytes: int) -> bool:
        return any(
            digest in group.digests and group.used_bytes - num_bytes < group.floor_bytes
            for group in self._groups.values()
        )
