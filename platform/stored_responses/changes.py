"""Wakes the readers of a stored object when this process changes it."""

from __future__ import annotations

import asyncio
from collections import defaultdict


class Changes:
    """Readers also look at the database from time to time, because another process can change an object."""

    def __init__(self) -> None:
        self._waiting: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    def notify(self, object_id: str) -> None:
        for event in self._waiting.get(object_id, ()):
            event.set()

    def watch(self, object_id: str) -> Watch:
        return Watch(self._waiting, object_id)


class Watch:
    """A context in which no change is missed, however late `wait` is called."""

    def __init__(self, waiting: defaultdict[str, set[asyncio.Event]], object_id: str) -> None:
        self._waiting = waiting
        self._id = object_id
        self._event = asyncio.Event()

    def __enter__(self) -> Watch:
        self._waiting[self._id].add(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting[self._id].discard(self._event)
        if not self._waiting[self._id]:
            del self._waiting[self._id]

    async def wait(self, timeout_s: float) -> None:
        """Wait until the object changes, at most `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return
        self._event.clear()
