"""Accounts in the fair order, and heaps over them that are mended only where something changed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from loramux.engine.sequence import Sequence

INPUT_PRICE = 1.0
OUTPUT_PRICE = 2.0
"""A new token costs a row of its own in a step; a prompt's tokens share their weights' reading."""

MAX_STALE = 8
"""Entries of a heap that are out of date and may stay in it, beside as many as there are shares."""

Turn = tuple[float, ...]
"""What sequences are ordered by; lower goes first."""


@dataclass(slots=True, eq=False)
class Share:
    """One account's position. `served` is its virtual token counter: priced tokens over its weight."""

    key: str
    weight: int = 1
    served: float = 0.0
    ready: list[Sequence] = field(default_factory=list)
    """Waiting sequences whose adapter is resident, by priority, then arrival."""
    cold: list[Sequence] = field(default_factory=list)
    """Those whose adapter is not, in the same order."""
    parked: dict[Sequence, None] = field(default_factory=dict)
    """Those that wait for a higher limit, and take no turn until they have it."""
    num_waiting_tokens: int = 0
    num_running: int = 0
    charged: float = 0.0
    """Priced tokens in all, whatever its weight."""
    num_admissions: int = 0
    """Of sequences that had not run before."""
    waits_since: int = 0
    """The number of all admissions there had been when its wait began: when it came, or was last served."""
    charged_before: float = 0.0
    """What all shares had been charged then."""

    @property
    def is_waiting(self) -> bool:
        return bool(self.ready or self.cold)

    @property
    def is_idle(self) -> bool:
        return not (self.ready or self.cold or self.parked or self.num_running)

    def line(self, is_ready: bool) -> list[Sequence]:
        return self.ready if is_ready else self.cold

    @property
    def typical_price(self) -> float:
        """Priced tokens of the next request: what those before it came to, and never less than its prompt."""
        head = min((line[0] for line in (self.ready, self.cold) if line), key=place)
        before = self.charged / self.num_admissions if self.num_admissions else 0.0
        return max(before, INPUT_PRICE * head.num_tokens)


def place(sequence: Sequence) -> tuple[int, int]:
    """A sequence's place among those of its share."""
    return -sequence.add.priority, sequence.arrival


class ShareHeap:
    """Shares by a key of theirs, which `update` looks up; entries that are out of date are dropped as they surface."""

    def __init__(self, key: Callable[[Share], Turn]) -> None:
        self._key = key
        self._heap: list[tuple[Turn, int, Share]] = []
        # The number of each share's entry; those with other numbers are out of date.
        self._current: dict[Share, int] = {}
        self._num_updates = 0

    def update(self, share: Share) -> None:
        self._num_updates += 1
        self._current[share] = self._num_updates
        heapq.heappush(self._heap, (self._key(share), self._num_updates, share))
        if len(self._heap) > 2 * len(self._current) + MAX_STALE:
            self._heap = [entry for entry in self._heap if self._current.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, share: Share) -> None:
        self._current.pop(share, None)

    def first(self) -> tuple[Turn, Share] | None:
        """The lowest key and its share, as of the share's last update."""
        while self._heap:
            key, number, share = self._heap[0]
            if self._current.get(share) == number:
                return key, share
            heapq.heappop(self._heap)
        return None

    def ascending(self) -> Iterator[tuple[Turn, Share]]:
        """All shares by rising keys; none is taken out, and each costs a logarithm of those before it."""
        # Keys mostly rise, so that what is out of date lies in front: it is dropped now, not passed each time.
        self.first()
        frontier = [(self._heap[0], 0)] if self._heap else []
        while frontier:
            (key, number, share), index = heapq.heappop(frontier)
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(self._heap):
                    heapq.heappush(frontier, (self._heap[child], child))
            if self._current.get(share) == number:
                yield key, share

    def least(self) -> Share | None:
        """The share with the lowest key, where keys only grow: none in the heap is too high then."""
        while (first := self.first()) is not None:
            key, share = first
            if key == self._key(share):
                return share
            self.update(share)
        return None
