"""Raises the token limits of sequences, and pauses sequences that have reached their limits."""

from __future__ import annotations

from collections.abc import Callable

from loramux.engine.adapters.adapter_pool import AdapterPool
from loramux.engine.scheduling.scheduler import Scheduler
from loramux.engine.sequences.sequence import Sequence
from loramux.engine.sequences.timers import Timers


class TokenGrants:
    """Raises limits as far as the context and the pool allow. Calls `end` with a sequence whose limit is not raised
    before its pause ends.
    """

    def __init__(
        self,
        max_model_len: int,
        scheduler: Scheduler,
        adapters: AdapterPool,
        timers: Timers,
        end: Callable[[Sequence], None],
    ) -> None:
        self._max_model_len = max_model_len
        self._scheduler = scheduler
        self._adapters = adapters
        self._timers = timers
        self._end = end

    def begin(self, sequence: Sequence) -> None:
        """Apply a pending raise. Called when the sequence first runs, because its adapter's size is then known."""
        entry = None if sequence.add.digest is None else self._adapters.find(sequence.add.digest)
        if entry is not None:
            sequence.num_adapter_pages = entry.num_pages
        if sequence.num_wanted:
            self._raise(sequence, sequence.num_wanted)

    def extend(self, sequence: Sequence, max_tokens: int) -> None:
        """Raise the sequence's limit, either now or when the sequence first runs. A paused sequence resumes if its
        limit rises.
        """
        num_wanted = sequence.num_prompt + max_tokens
        if sequence.add.digest is None or sequence.has_run:
            self._raise(sequence, num_wanted)
        else:
            sequence.num_wanted = max(sequence.num_wanted, num_wanted)

    def fits(self, sequence: Sequence) -> bool:
        """True if all tokens granted to the sequence still fit in the pool."""
        return sequence.num_paged <= self._most_tokens(sequence)

    def pauses(self, sequence: Sequence) -> bool:
        """Pause a sequence that has reached its limit. Returns False if it may not pause or its limit cannot be
        raised.
        """
        if sequence.add.pause_s <= 0 or sequence.num_reserved >= self._most_tokens(sequence):
            return False
        sequence.is_paused = True
        limit = sequence.num_reserved

        def end_pause(sequence: Sequence) -> None:
            if sequence.is_paused and sequence.num_reserved == limit:
                self._end(sequence)

        self._timers.after(sequence, sequence.add.pause_s, end_pause)
        return True

    def _raise(self, sequence: Sequence, num_wanted: int) -> None:
        num_granted = min(num_wanted, self._most_tokens(sequence))
        self._scheduler.set_limit(sequence, max(sequence.num_reserved, num_granted))
        if not sequence.has_reached_limit:
            sequence.is_paused = False

    def _most_tokens(self, sequence: Sequence) -> int:
        """Highest possible limit of a sequence in tokens, prompt included."""
        entry = None if sequence.add.digest is None else self._adapters.find(sequence.add.digest)
        # A waiting sequence does not know its adapter's size, but the pool may have loaded the adapter for another.
        num_adapter_pages = max(sequence.num_adapter_pages, 0 if entry is None else entry.num_pages)
        in_pool = self._scheduler.max_tokens(num_adapter_pages, sequence.add.digest)
        return min(self._max_model_len, in_pool)
