"""Limits how much work of one kind a tenant has this server do at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from loramux.platform.errors import RateLimited, Unavailable

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

    def num_held(self, tenant_id: str) -> int:
        return self._running[tenant_id]

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


class TenantQueues:
    """At most `most` pieces of work for each tenant at a time, and up to `most_waiting` others that wait in order, each
    for at most `longest_wait_s` seconds.

    `what` and `code` are those of `TenantSlots`.
    """

    def __init__(self, most: int, most_waiting: int, longest_wait_s: float, what: str, code: str) -> None:
        self._most = most
        self._longest_wait_s = longest_wait_s
        self._what = what
        self._code = code
        self._entered = TenantSlots(most + most_waiting, what, code)
        self._turns: dict[str, asyncio.Semaphore] = {}

    @asynccontextmanager
    async def turn(self, tenant_id: str) -> AsyncIterator[None]:
        """Wait until the work may start, and count it until the context ends. Raises RateLimited, or
        Unavailable if the wait takes too long.
        """
        try:
            with self._entered.held(tenant_id):
                turns = self._turns.setdefault(tenant_id, asyncio.Semaphore(self._most))
                try:
                    async with asyncio.timeout(self._longest_wait_s):
                        await turns.acquire()
                except TimeoutError:
                    message = f"no turn within {self._longest_wait_s:g} s: {self.num_entered(tenant_id)} {self._what}"
                    raise Unavailable(message, code=self._code, retry_after_s=RETRY_S) from None
                try:
                    yield
                finally:
                    turns.release()
        finally:
            if not self.num_entered(tenant_id):
                self._turns.pop(tenant_id, None)

    def num_entered(self, tenant_id: str) -> int:
        """Return the number of pieces of work that run or wait."""
        return self._entered.num_held(tenant_id)
