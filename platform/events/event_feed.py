"""Waits for new events, with one question to the database at a time for all who wait in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

POLL_S = 0.5
"""Time between two questions, in seconds. Nothing is asked while nobody waits."""


class EventFeed:
    """`advance` numbers new events and returns the highest position: see `EventLog.advance`."""

    def __init__(self, advance: Callable[[], Awaitable[int]], poll_s: float = POLL_S) -> None:
        self._advance = advance
        self._poll_s = poll_s
        self._head = 0
        self._turn = asyncio.Lock()

    async def head(self) -> int:
        """Number the new events now, and return the highest position."""
        self._head = max(self._head, await self._advance())
        return self._head

    async def wait(self, after: int, timeout_s: float) -> int:
        """Wait until there is an event after a position, and return the highest position, which is `after` if no event
        came within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while self._head <= after:
                    # The holder of the lock asks. The others then find that the head has moved.
                    async with self._turn:
                        if self._head <= after:
                            await self.head()
                        if self._head <= after:
                            await asyncio.sleep(self._poll_s)
        except TimeoutError:
            return after
        return self._head
