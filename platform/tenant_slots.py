"""Limits how much work of one kind a tenant has this server do at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from loramux.platform.errors import RateLimited

RETRY_S = 5.0


class TenantSlots:
    """At most `most` pieces of work for each tenant. `what` says in an error what is already being done, as in "files
    are already being uploaded", and `code` is the error's code.
    """

    def __init__(self, most: int, what: str, code: str) -> None:
        self._most = most
        self._what = what
        self._code = code
        self._running: Counter[str] = Counter()

    @contextmanager
    def held(self, tenant_id: str) -> Iterator[None]:
        """Count a piece of work until the context ends. Raises RateLimited."""
        if self._running[tenant_id] >= self._most:
            raise RateLimited(f"{self._most} {self._what}", code=self._code, retry_after_s=RETRY_S)
        self._running[tenant_id] += 1
        try:
            yield
        finally:
            self._running[tenant_id] -= 1
            if not self._running[tenant_id]:
                del self._running[tenant_id]
