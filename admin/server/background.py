"""Work that runs for as long as a server serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager


@asynccontextmanager
async def in_background(work: Coroutine[None, None, None], name: str) -> AsyncIterator[None]:
    """Run `work` in a task. At the end of the block, cancel the task and wait until it has ended."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
