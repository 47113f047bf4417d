"""Shares in the fair order, and heaps of shares that are updated incrementally."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from loramux.engine.protocol.service_tiers import INPUT_PRICE
from loramux.engine.sequences.sequence import Sequence, ShareKey

TOKEN_S = 0.005
"""Processor time with the price of one output token, in seconds."""

MAX_STALE = 8
"""Number of outdated heap entries to tolerate, in addition to one per share."""

TurnKey = tuple[float, ...]
"""Sort key of waiting sequences. The lowest goes first."""


@dataclass(slots=True, eq=False)
class FairShare:
    """A share's state in the fair order. `served` is its virtual token counter: token prices divided by the weight."""

    key: ShareKey
    weight: float = 1.0
    served: float = 0.0
    ready: list[Sequence] = field(default_factory=list)
    """Waiting sequences whose adapter is resident, ordered by priority, then arrival."""
    cold: list[Sequence] = field(default_factory=list)
    """Waiting sequences whose adapter is not resident, in the same order."""
    parked: list[Sequence] = field(default_factory=list)
    """Sequences that get no turn, in the same order: see `FairQueue`."""
    num_waiting_tokens: int = 0
    num_running: int = 0
    charged: float = 0.0
    """Sum of the prices of all tokens, not divided by weight."""
    num_admissions: int = 0
    """Number of sequences admitted for the first time."""
    waits_since: int = 0
    """Total admissions of all shares when this share's wait began. A wait begins when the share gets its first waiting
    sequence, and again whenever one of its sequences is admitted.
    """
    charged_before: float = 0.0
    """Total charge of all shares when this share's wait began."""

    @property
    def rank(self) -> int:
        return self.key[1]

    @property
    def is_waiting(self) -> bool:
        return bool(self.ready or self.cold)

    @property
    def is_idle(self) -> bool:
        return not (self.ready or self.cold or self.parked or self.num_running)

    def is_parked(self, sequence: Sequence) -> bool:
        index = bisect_left(self.parked, place(sequence), key=place)
        return index < len(self.parked) and self.parked[index] is sequence

    def line(self, is_ready: bool) -> list[Sequence]:
        return self.ready if is_ready else self.cold

    @property
    def typical_price(self) -> float:
        """Estimated price of the next request: the average so far, but at least the price of its prompt."""
        head = min((line[0] for line in (self.ready, self.cold) if line), key=place)
        before = self.charged / self.num_admissions if self.num_admissions else 0.0
        return max(before, INPUT_PRICE * head.num_tokens)


def place(sequence: Sequence) -> tuple[int, int]:
    return sequence.add.priority, sequence.arrival


class ShareHeap:
    """A heap of shares. `update` reads a share's current key. Outdated entries are dropped when they reach the top."""

    def __init__(self, key: Callable[[FairShare], TurnKey]) -> None:
        self._key = key
        self._heap: list[tuple[TurnKey, int, FairShare]] = []
        # For each share, the update number of its current heap entry. Entries with other numbers are outdated.
        self._current: dict[FairShare, int] = {}
        self._num_updates = 0

    def update(self, share: FairShare) -> None:
        self._num_updates += 1
        self._current[share] = self._num_updates
        heapq.heappush(self._heap, (self._key(share), self._num_updates, share))
        if len(self._heap) > 2 * len(self._current) + MAX_STALE:
            self._heap = [entry for entry in self._heap if self._current.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def discard(self, share: FairShare) -> None:
        self._current.pop(share, None)

    def first(self) -> tuple[TurnKey, FairShare] | None:
        """The lowest key and its share. The key is the one that the share had at its last update."""
        while self._heap:
            key, number, share = self._heap[0]
            if self._current.get(share) == number:
                return key, share
            heapq.heappop(self._heap)
        return None

    def ascending(self) -> Iterator[tuple[TurnKey, FairShare]]:
        """Iterate over all shares by ascending key, without removing them, in logarithmic time per share."""
        # Keys mostly rise, so outdated entries gather at the front. Drop them once instead of skipping them each time.
        self.first()
        frontier = [(self._heap[0], 0)] if self._heap else []
        while frontier:
            (key, number, share), index = heapq.heappop(frontier)
            for child in (2 * index + 1, 2 * index + 2):
                if child < len(self._heap):
                    heapq.heappush(frontier, (self._heap[child], child))
            if self._current.get(share) == number:
                yield key, share

    def least(self) -> FairShare | None:
        """The share with the lowest key. Requires that keys only grow, so that no stored key is too high."""
        while (first := self.first()) is not None:
            key, share = first
            if key == self._key(share):
                return share
            self.update(share)
        return None
