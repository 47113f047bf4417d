"""Packed adapters in host memory, bounded, least recently used out first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from loramux.adapter_store.packing import PackedAdapter


@dataclass(slots=True)
class _Entry:
    packed: PackedAdapter
    num_leases: int


class HostTier:
    """Not thread-safe: its owner holds a lock. A leased entry stays even where the bound is exceeded by it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self.used_bytes = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._entries

    def lease(self, digest: str) -> PackedAdapter | None:
        """Count one more lease of an entry; None where there is none."""
        entry = self._entries.get(digest)
        if entry is None:
            return None
        entry.num_leases += 1
        self._entries.move_to_end(digest)
        return entry.packed

    def add(self, packed: PackedAdapter, num_leases: int) -> None:
        """Keep an adapter that is leased `num_leases` times from the start."""
        assert packed.digest not in self._entries
        self._entries[packed.digest] = _Entry(packed, num_leases)
        self.used_bytes += packed.payload.nbytes
        self._evict()

    def release(self, digest: str) -> None:
        entry = self._entries[digest]
        assert entry.num_leases > 0
        entry.num_leases -= 1
        self._evict()

    def _evict(self) -> None:
        while self.used_bytes > self._max_bytes:
            # Few are leased, and these were used last: the search ends at once.
            digest = next((digest for digest, entry in self._entries.items() if entry.num_leases == 0), None)
            if digest is None:
                return
            self.used_bytes -= self._entries.pop(digest).packed.payload.nbytes
