"""What is to happen to sequences at a time, on the engine's own clock."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

from loramux.engine.live_sequences import LiveSequences
from loramux.engine.sequence import Sequence

Action = Callable[[Sequence], None]


class Timers:
    """Calls actions with their sequences once their time has come.

    A sequence that has ended by then is left alone, and is not kept in memory until then; an action that is no longer
    wanted finds that out itself.
    """

    def __init__(self, clock: Callable[[], float], live: LiveSequences) -> None:
        self._clock = clock
        self._live = live
        self._pending: list[tuple[float, int, bytes, str, int, Action]] = []
        self._num_added = 0

    def after(self, sequence: Sequence, seconds: float, action: Action) -> None:
        # One time that is not a number would keep every later one from coming up.
        assert math.isfinite(seconds)
        self._num_added += 1
        # An id may come again after its sequence has ended; the arrival tells the two apart.
        identity = sequence.owner, sequence.sequence_id, sequence.arrival
        heapq.heappush(self._pending, (self._clock() + seconds, self._num_added, *identity, action))

    def fire(self) -> None:
        """Do what is due, in the order of its times."""
        while self._pending and self._pending[0][0] <= self._clock():
            _, _, owner, sequence_id, arrival, action = heapq.heappop(self._pending)
            sequence = self._live.find(owner, sequence_id)
            if sequence is not None and sequence.arrival == arrival:
                action(sequence)
