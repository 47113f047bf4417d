"""How far sequences may go: the limit that each was granted, what raises it, and the pause of one that reached it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from loramux.engine.adapters.adapter_pool import AdapterPool
from loramux.engine.scheduling.scheduler import Scheduler
from loramux.engine.sequence import Sequence
from loramux.engine.timers import Timers


class TokenGrants:
    """Limits are raised as far as the context and the pool reach. `end` is called when a pause was in vain."""

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
        """The sequence runs for the first time: how much room its adapter leaves is known from now on."""
        entry = None if sequence.add.digest is None else self._adapters.find(sequence.add.digest)
        if entry is not None:
            sequence.num_adapter_pages = entry.num_pages
        if sequence.wanted_max_tokens:
            self._raise(sequence, sequence.wanted_max_tokens)

    def extend(self, sequence: Sequence, max_tokens: int) -> None:
        """Raise the sequence's limit, now or when it first runs; if it paused, it goes on."""
        if sequence.add.digest is None or sequence.has_run:
            self._raise(sequence, max_tokens)
        else:
            sequence.wanted_max_tokens = max(sequence.wanted_max_tokens, max_tokens)

    def fits(self, sequence: Sequence) -> bool:
        """Whether the pool can still hold what was granted."""
        return sequence.num_reserved <= self._most_tokens(sequence)

    def pauses(self, sequence: Sequence) -> bool:
        """Let a sequence at its limit wait for a higher one, if it may and there can be one."""
        if sequence.add.pause_s <= 0 or sequence.num_reserved >= self._most_tokens(sequence):
            return False
        sequence.is_paused = True
        limit = sequence.add.max_tokens

        def end_pause(sequence: Sequence) -> None:
            if sequence.is_paused and sequence.add.max_tokens == limit:
                self._end(sequence)

        self._timers.after(sequence, sequence.add.pause_s, end_pause)
        return True

    def _raise(self, sequence: Sequence, wanted: int) -> None:
        max_tokens = max(sequence.add.max_tokens, min(wanted, self._most_tokens(sequence) - sequence.num_prompt))
        self._scheduler.change(sequence, msgspec.structs.replace(sequence.add, max_tokens=max_tokens))
        if not sequence.is_chosen_out:
            sequence.is_paused = False

    def _most_tokens(self, sequence: Sequence) -> int:
        """The most tokens that a sequence can come to, its prompt included."""
        in_pool = self._scheduler.max_tokens(sequence.num_adapter_pages, sequence.add.digest)
        return min(self._max_model_len, in_pool)
