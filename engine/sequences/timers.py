"""Per-sequence timers, on the engine's clock."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from loramux.engine.sequences.live_sequences import LiveSequences
from loramux.engine.sequences.sequence import Sequence

Action = Callable[[Sequence], None]


class Timers:
    """Calls each action with its sequence when the action is due.

    A timer does nothing if its sequence has ended, and does not keep the sequence in memory. Timers cannot be
    cancelled, so each action must check whether it is still needed.
    """

    def __init__(self, clock: Callable[[], float], live: LiveSequences) -> None:
        self._clock = clock
        self._live = live
        self._pending: list[tuple[float, int, bytes, str, int, Action]] = []
        self._num_added = 0

    def after(self, sequence: Sequence, seconds: float, action: Action) -> None:
        # A single NaN would break the order of the heap and block all later timers.
        assert math.isfinite(seconds)
        self._num_added += 1
        # An id can be reused after its sequence has ended. The arrival number distinguishes the two sequences.
        identity = sequence.owner, sequence.sequence_id, sequence.arrival
        heapq.heappush(self._pending, (self._clock() + seconds, self._num_added, *identity, action))

    def fire(self) -> None:
        """Run all due actions, earliest first."""
        while self._pending and self._pending[0][0] <= self._clock():
            _, _, owner, sequence_id, arrival, action = heapq.heappop(self._pending)
            sequence = self._live.find(owner, sequence_id)
            if sequence is not None and sequence.arrival == arrival:
                action(sequence)
