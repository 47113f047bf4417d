"""Waits for new events, with one question to the database at a time for all who wait in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection

POLL_S = 0.5
"""Time between two questions, in seconds. Nothing is asked while nobody waits."""


class EventFeed:
    """`advance` numbers new events and returns the highest position, and `changed` returns the tenants that have events
    after a position: see `EventLog`.
    """

    def __init__(
        self,
        advance: Callable[[], Awaitable[int]],
        changed: Callable[[int], Awaitable[Collection[str]]],
        poll_s: float = POLL_S,
    ) -> None:
        self._advance = advance
        self._changed = changed
        self._poll_s = poll_s
        self._head: int | None = None
        self._first_head = 0
        self._heads: dict[str, int] = {}
        self._question: asyncio.Task[None] | None = None

    async def head(self) -> int:
        """Number the new events now, and return the highest position."""
        known = self._head
        head = await self._advance()
        if known is None:
            # Who has events up to here need not be asked, since nobody waits for earlier ones.
            self._first_head = head
        elif head > known:
            for tenant_id in await self._changed(known):
                self._heads[tenant_id] = max(self._heads.get(tenant_id, 0), head)
        self._head = max(self._head or 0, head)
        return self._head

    async def wait(self, after: int, timeout_s: float, tenant_id: str | None = None) -> int:
        """Wait until there is an event after a position, of one tenant or of any, and return the highest position,
        which is `after` if no such event came within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._latest(tenant_id) <= after:
                    # One question answers all who wait. It goes on if one of them leaves.
                    if self._question is None or self._question.done():
                        self._question = asyncio.create_task(self._ask())
                        # A failure is raised in those who wait, and asyncio reports nothing if nobody does.
                        self._question.add_done_callback(lambda task: task.cancelled() or task.exception())
                    await asyncio.shield(self._question)
        except TimeoutError:
            return after
        return self._head or 0

    async def _ask(self) -> None:
        await asyncio.sleep(self._poll_s)
        await self.head()

    def _latest(self, tenant_id: str | None) -> int:
        return self._head or 0 if tenant_id is None else self._heads.get(tenant_id, self._first_head)
