"""Work that runs for as long as a server serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager

import structlog
from sqlalchemy.exc import SQLAlchemyError

RETRY_S = 5.0
"""Longest pause after an error in repeated work, in seconds."""

log = structlog.get_logger(__name__)


@asynccontextmanager
async def in_background(work: Coroutine[None, None, None], name: str) -> AsyncIterator[None]:
    """Run `work` in a task. At the end of the block, cancel the task and wait until it has ended.

    If an error ends the work earlier, it is logged at once, and the server continues without the work.
    """
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_error)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def repeat(work: Callable[[], Awaitable[None]], interval_s: float, trouble: str) -> None:
    """Call `work` with pauses of `interval_s` until cancelled. After an error, the pause is at most RETRY_S.

    Every error is logged as `trouble`, and ends only one call. An error that repeats the last one has no traceback.
    """
    last: str | None = None
    while True:
        pause_s, failure = interval_s, None
        try:
            await work()
        except Exception as error:
            pause_s, failure = min(interval_s, RETRY_S), repr(error)
            if isinstance(error, SQLAlchemyError):
                log.warning(f"{trouble}; trying again", error=str(error))
            elif failure == last:
                log.error(f"{trouble}; trying again", error=failure)
            else:
                log.exception(f"{trouble}; trying again")
        last = failure
        await asyncio.sleep(pause_s)


def _log_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("work in the background has ended; restart the server", work=task.get_name(), exc_info=error)
