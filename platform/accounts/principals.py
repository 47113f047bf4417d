"""Authenticated callers, and a cache of recently authenticated ones."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from loramux.platform.accounts.change_watch import ChangeWatch

MAX_ENTRIES = 10_000

_UNWATCHED = ChangeWatch()


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
    read_us: int
    expires_us: int
    is_watched: bool


class PrincipalCache:
    """Caches principals by the SHA-256 of their keys. Only valid keys are cached, so guesses cannot fill the cache.

    `watch` knows of changes to all keys and tenants, but not to the tokens of a `KeyAuthentication`. Thread-safe.
    """

    def __init__(self) -> None:
        self.watch = ChangeWatch()
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    def get(self, sha256: bytes, now_us: int) -> Principal | None:
        with self._lock:
            entry = self._entries.get(sha256)
            if entry is None or now_us >= entry.expires_us:
                return None
            watch = self.watch if entry.is_watched else _UNWATCHED
            return entry.principal if watch.is_fresh(entry.read_us, now_us) else None

    def put(
        self,
        sha256: bytes,
        principal: Principal,
        read_us: int,
        expires_us: int,
        *,
        num_changes: int,
        is_watched: bool = True,
    ) -> None:
        """Cache what was read at `read_us`, unless `watch` has noted more than `num_changes` changes by now."""
        with self._lock:
            if num_changes != self.watch.num_changes:
                return
            self._entries[sha256] = _Entry(principal, read_us, expires_us, is_watched)
            self._entries.move_to_end(sha256)
            if len(self._entries) > MAX_ENTRIES:
                self._entries.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self.watch.note_change()

    def forget(self, key_id: str) -> None:
        with self._lock:
            for sha256 in [sha for sha, entry in self._entries.items() if entry.principal.key_id == key_id]:
                del self._entries[sha256]
