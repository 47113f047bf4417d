"""Gives each tenant one turn at a time for work outside the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from loramux.platform.errors import RateLimited

Result = TypeVar("Result")


@dataclass(slots=True)
class _Waiting:
    """A tenant's waiting and running requests. The lock lets them run one at a time."""

    num_requests: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class TenantTurns:
    """Limits each tenant to one turn at a time and a bounded number of waiting requests.

    Not thread-safe: use it only from the event loop. Work in a thread continues after its client disconnects, so a turn
    ends when the work ends.
    """

    def __init__(self, max_waiting_per_tenant: int, too_many: Callable[[], RateLimited]) -> None:
        """`max_waiting_per_tenant` includes the running request. `too_many` creates the error for a further request."""
        self._max_waiting_per_tenant = max_waiting_per_tenant
        self._too_many = too_many
        self._waiting: dict[str, _Waiting] = {}

    @property
    def num_tenants(self) -> int:
        """Number of tenants with waiting or running requests."""
        return len(self._waiting)

    async def run(self, tenant_id: str, work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Wait for the tenant's turn and return the result of `work`.

        Raises RateLimited and anything that `work` raises.
        """
        waiting = self._waiting.setdefault(tenant_id, _Waiting())
        if waiting.num_requests >= self._max_waiting_per_tenant:
            raise self._too_many()
        waiting.num_requests += 1
        try:
            await waiting.turn.acquire()
        except asyncio.CancelledError:
            self._leave(tenant_id, waiting)
            raise
        running = asyncio.create_task(work())

        def end(ended: asyncio.Task[Result]) -> None:
            if not ended.cancelled():
                # Retrieve the exception, which asyncio would otherwise report if the client has gone.
                ended.exception()
            waiting.turn.release()
            self._leave(tenant_id, waiting)

        running.add_done_callback(end)
        return await asyncio.shield(running)

    def _leave(self, tenant_id: str, waiting: _Waiting) -> None:
        waiting.num_requests -= 1
        if not waiting.num_requests:
            del self._waiting[tenant_id]
