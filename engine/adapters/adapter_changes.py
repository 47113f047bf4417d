"""The last changes to adapters in the pool, which gateways report as events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from loramux.engine.protocol.messages import AdapterChange

MAX_CHANGES = 512
"""Number of changes that are kept. If more happen between two questions, the oldest are lost."""


class AdapterChanges:
    """A bounded record of changes. Numbers begin at the time of the start, so that a later engine has higher ones,
    unless the clock has been set back.
    """

    def __init__(self, first_number: int | None = None) -> None:
        self._next = time.time_ns() // 1000 if first_number is None else first_number
        self._changes: deque[AdapterChange] = deque(maxlen=MAX_CHANGES)

    def note(self, digest: str, kind: str) -> None:
        self._changes.append(AdapterChange(number=self._next, digest=digest, kind=kind))
        self._next += 1

    def after(self, number: int) -> tuple[AdapterChange, ...]:
        """Return the changes with higher numbers, oldest first. If `number` is not from this record, return all."""
        is_own = number < self._next
        return tuple(change for change in self._changes if change.number > number or not is_own)


def unseen(changes: Sequence[AdapterChange], seen: int) -> Sequence[AdapterChange]:
    """Return the new changes of those that an engine has named as later than `seen`, which may be named twice. If all
    numbers are lower, `seen` is from an earlier engine, before the clock was set back.
    """
    if changes and changes[-1].number < seen:
        return changes
    return [change for change in changes if change.number > seen]
