"""The adapters that an engine keeps in host memory, where its staging process put them."""

from __future__ import annotations

import threading
from collections.abc import Collection

from loramux.adapter_store.formats.packing import PackedAdapter
from loramux.adapter_store.tiers.host_tier import HostTier
from loramux.adapter_store.tiers.leases import Lease
from loramux.adapter_store.tiers.tier_contents import TierContents
from loramux.adapter_store.tiers.tier_figures import Held, TierFigures


class HostStore:
    """Leases packed adapters from host memory; leases may be released on any thread.

    Evicts the least recently used first and never what is leased. Room for what is coming is made beforehand, as much
    as the last adapter took for each: nobody knows yet what it will take.
    """

    def __init__(self, host_bytes: int, figures: TierFigures) -> None:
        self._figures = figures
        self._lock = threading.Lock()
        self._host = HostTier(host_bytes)
        self._last_bytes = 0
        self._expected_bytes = 0
        figures.held = lambda: {"host": Held(self._host.used_bytes, self._host.num_evictions)}

    def lease(self, digest: str) -> Lease | None:
        """Hold an adapter that is here; None where it is not."""
        with self._figures.of_load(digest), self._figures.timed("host", "lookup"), self._lock:
            packed = self._host.lease(digest)
        self._figures.count_lookup("host", packed is not None)
        return None if packed is None else Lease(packed, self._release)

    def expect(self, num_adapters: int) -> None:
        """So many adapters are coming now."""
        expected_bytes = num_adapters * self._last_bytes
        with self._lock:
            self._host.unreserve(self._expected_bytes)
            self._expected_bytes = expected_bytes
            self._host.reserve(expected_bytes)

    def add(self, packed: PackedAdapter) -> Lease:
        """Keep an adapter that came, and hold it."""
        self._last_bytes = packed.payload.nbytes
        with self._lock:
            # A fetch that was cancelled may have brought it before.
            found = self._host.lease(packed.digest)
            if found is None:
                self._host.add(packed, num_leases=1)
        return Lease(found or packed, self._release)

    def protect(self, group: str, digests: Collection[str], floor_bytes: int) -> None:
        """Keep up to `floor_bytes` of these adapters; see `HostTier.protect`."""
        with self._lock:
            self._host.protect(group, digests, floor_bytes)

    def contents(self) -> TierContents:
        with self._lock:
            return self._host.contents()

    def _release(self, digest: str) -> None:
        with self._lock:
            self._host.release(digest)
