"""Authenticated callers, and a cache of recently authenticated ones."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

MAX_STALE_US = 5_000_000
"""How long an authenticated key is trusted without hearing from the database, in microseconds."""

MAX_ENTRIES = 10_000


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. A platform key has no tenant and therefore cannot run inference."""

    key_id: str
    tenant_id: str | None
    tenant_slug: str | None
    scopes: frozenset[str]
    adapter_ids: frozenset[str] | None = None
    """The adapters that the key may name. None means every adapter that its tenant may call."""
    max_service_tier: str | None = None
    default_service_tier: str | None = None
    """The key's own service tiers, or None for those of its tenant: see `TierRights.for_key`."""

    def may_name(self, adapter_id: str | None) -> bool:
        """Return whether the key's own limit allows the adapter. The tenant's rights are checked elsewhere.

        `adapter_id` is None for an object without an adapter, such as a request to the base. A limited key cannot see
        such objects.
        """
        return self.adapter_ids is None or adapter_id in self.adapter_ids

    @property
    def is_platform_admin(self) -> bool:
        return "platform:admin" in self.scopes

    @property
    def holder(self) -> str:
        """The tenant or the platform key whose concurrency limit applies on the admin listener."""
        return self.tenant_id or self.key_id


@dataclass(frozen=True, slots=True)
class _Entry:
    principal: Principal
    cached_us: int
    expires_us: int | None
    is_watched: bool


class PrincipalCache:
    """Caches principals by the SHA-256 of their keys. Only valid keys are cached, so guesses cannot fill the cache.

    An entry is trusted for MAX_STALE_US, and for as long again after each `confirm` if the database announces changes
    to it. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._confirmed_us = 0
        self.num_clears = 0
        """How often all entries have been removed."""

    def get(self, sha256: bytes, now_us: int) -> Principal | None:
        with self._lock:
            entry = self._entries.get(sha256)
            if entry is None:
                return None
            since_us = entry.cached_us
            if entry.is_watched and since_us <= self._confirmed_us <= now_us:
                since_us = self._confirmed_us
            # Setting the clock back must not extend an entry's life.
            is_good = entry.cached_us <= now_us < since_us + MAX_STALE_US
            if not is_good or (entry.expires_us is not None and now_us >= entry.expires_us):
                return None
            return entry.principal

    def put(
        self,
        sha256: bytes,
        principal: Principal,
        now_us: int,
        expires_us: int | None,
        *,
        num_clears: int,
        is_watched: bool = True,
    ) -> None:
        """Cache what was read from the database after `num_clears` had this value. What was read before the last clear
        may be outdated, so it is not cached. `is_watched` is True if each change of it leads to a `clear`.
        """
        with self._lock:
            if num_clears != self.num_clears:
                return
            self._entries[sha256] = _Entry(principal, now_us, expires_us, is_watched)
            self._entries.move_to_end(sha256)
            if len(self._entries) > MAX_ENTRIES:
                self._entries.popitem(last=False)

    def confirm(self, now_us: int) -> None:
        """Note that nothing has changed at this time since the last `clear`."""
        with self._lock:
            self._confirmed_us = now_us

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self.num_clears += 1

    def forget(self, key_id: str) -> None:
        with self._lock:
            for sha256 in [sha for sha, entry in self._entries.items() if entry.principal.key_id == key_id]:
                del self._entries[sha256]
