"""Recently authenticated keys, so that not every request reads the database; at most five seconds stale."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from loramux.platform.accounts.principals import Principal

MAX_STALE_US = 5_000_000
MAX_ENTRIES = 10_000


@dataclass(frozen=True, slots=True)
class _Entry:
    principal: Principal
    cached_us: int
    good_until_us: int


class PrincipalCache:
    """Principals by the SHA-256 of their key; only good keys are kept, so guesses cannot fill it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()

    def get(self, sha256: bytes, now_us: int) -> Principal | None:
        with self._lock:
            entry = self._entries.get(sha256)
            # A clock that went back must not make an entry live longer.
            if entry is None or not entry.cached_us <= now_us < entry.good_until_us:
                return None
            return entry.principal

    def put(self, sha256: bytes, principal: Principal, now_us: int, expires_us: int | None) -> None:
        good_until_us = now_us + MAX_STALE_US
        if expires_us is not None:
            good_until_us = min(good_until_us, expires_us)
        with self._lock:
            self._entries[sha256] = _Entry(principal, now_us, good_until_us)
            self._entries.move_to_end(sha256)
            if len(self._entries) > MAX_ENTRIES:
                self._entries.popitem(last=False)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def forget(self, key_id: str) -> None:
        with self._lock:
            for sha256 in [sha for sha, entry in self._entries.items() if entry.principal.key_id == key_id]:
                del self._entries[sha256]
