"""Work that runs for as long as a server serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager

import structlog
from sqlalchemy.exc import SQLAlchemyError

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
    """Call `work` with pauses of `interval_s` until cancelled. Every error is logged as `trouble`, and ends only one
    call.
    """
    while True:
        try:
            await work()
        except SQLAlchemyError as error:
            log.warning(f"{trouble}; trying again", error=str(error))
        except Exception:
            log.exception(f"{trouble}; trying again")
        await asyncio.sleep(interval_s)


def _log_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("work in the background has ended; restart the server", work=task.get_name(), exc_info=error)
