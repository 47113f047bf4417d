"""Places for calls that last: who gets none within a while is told to come again."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio

from loramux.platform.errors import Unavailable

SLOT_TIMEOUT_S = 10.0
"""How long a call waits for a place; it holds a connection meanwhile, and no thread."""
RETRY_AFTER_S = 5.0


async def take_slot(limiter: anyio.CapacityLimiter, what: str) -> Callable[[], None]:
    """Take a place, and return what gives it back. Raises Unavailable `too_many_<what>`."""
    borrower = object()
    try:
        with anyio.fail_after(SLOT_TIMEOUT_S):
            await limiter.acquire_on_behalf_of(borrower)
    except TimeoutError:
        raise Unavailable(
            f"as many {what} as this server takes at once are under way; try again",
            code=f"too_many_{what}",
            retry_after_s=RETRY_AFTER_S,
        ) from None
    return lambda: limiter.release_on_behalf_of(borrower)


@asynccontextmanager
async def slot(limiter: anyio.CapacityLimiter, what: str) -> AsyncIterator[None]:
    """A place for as long as the block lasts."""
    give_back = await take_slot(limiter, what)
    try:
        yield
    finally:
        give_back()
