"""Limits how many files a tenant uploads and downloads at once, because each takes space on this server's disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from loramux.platform.errors import RateLimited

MAX_TRANSFERS = 4
"""Maximum number of a tenant's uploads and downloads that one server handles at once."""
RETRY_S = 5.0


class Transfers:
    """The running transfers, by tenant."""

    def __init__(self, most: int = MAX_TRANSFERS) -> None:
        self._most = most
        self._running: Counter[str] = Counter()

    @contextmanager
    def held(self, tenant_id: str) -> Iterator[None]:
        """Count a transfer until the context ends. Raises RateLimited."""
        if self._running[tenant_id] >= self._most:
            message = f"{self._most} files of this tenant are already being uploaded or downloaded"
            raise RateLimited(message, code="too_many_transfers", retry_after_s=RETRY_S)
        self._running[tenant_id] += 1
        try:
            yield
        finally:
            self._running[tenant_id] -= 1
            if not self._running[tenant_id]:
                del self._running[tenant_id]
