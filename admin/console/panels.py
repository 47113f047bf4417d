"""Independent parts of a page. A failed part shows its error without affecting the others."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from loramux.admin.console.rest_calls import RestError

T = TypeVar("T")
MAX_KEPT = 500


@dataclass(frozen=True, slots=True)
class Panel(Generic[T]):
    """Either `data` or the `problem` that prevented loading it."""

    data: T | None
    problem: RestError | None = None


async def panel(awaited: Awaitable[T]) -> Panel[T]:
    try:
        return Panel(await awaited)
    except RestError as error:
        return Panel(None, error)


class Recent:
    """A cache of recent results, so that one computation serves many viewers. Concurrent calls share a result."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[Any, tuple[float, asyncio.Task[Any]]] = OrderedDict()

    async def get(self, key: Any, fresh_s: float, make: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `make`, computed at most `fresh_s` ago. A failure is raised in all waiting calls and is
        not cached.
        """
        made_s, task = self._kept.get(key, (0.0, None))
        if task is None or self._clock() - made_s >= fresh_s or (task.done() and not _is_good(task)):
            task = asyncio.ensure_future(make())
            self._kept[key] = (self._clock(), task)
            self._kept.move_to_end(key)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        # Shielded, so that a viewer who leaves does not cancel the computation for other viewers.
        found: T = await asyncio.shield(task)
        return found


def _is_good(task: asyncio.Task[Any]) -> bool:
    if task.cancelled() or task.exception() is not None:
        return False
    # Do not reuse a failed panel, so that the page recovers as soon as the problem is gone.
    result = task.result()
    return not (isinstance(result, Panel) and result.problem is not None)
