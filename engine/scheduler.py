"""Chooses what each step runs: continuous batching with chunked prefill under one token budget."""

from __future__ import annotations

from collections import deque

from loramux.engine.adapter_pool import AdapterPhase, AdapterPool
from loramux.engine.batch import ScheduledSequence
from loramux.engine.messages import Add
from loramux.engine.page_pool import PageOwner, PagePool
from loramux.engine.sequence import Sequence, SequenceState, page_list


class Scheduler:
    """Waiting and running sequences of one engine.

    Decode rows come first, then chunks of prompts that are running, then new sequences in order of arrival. A
    sequence whose adapter is still loading is passed over; it blocks nobody. When no page is left for a running
    sequence, the youngest running one gives its pages back and is computed again later.
    """

    def __init__(
        self, pages: PagePool, adapters: AdapterPool, page_tokens: int, max_batch_tokens: int, max_sequences: int
    ) -> None:
        self._pages = pages
        self._adapters = adapters
        self._page_tokens = page_tokens
        self._max_batch_tokens = max_batch_tokens
        self._max_sequences = max_sequences
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        # Sequences that, with their adapter, need more pages than there are.
        self._unfit: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, sequence: Sequence) -> None:
        if sequence.add.digest is not None:
            self._adapters.prefetch(sequence.add.digest)
        self.waiting.append(sequence)

    def schedule(self) -> list[ScheduledSequence]:
        """The next step's sequences, those of one adapter side by side; empty when nothing can run."""
        budget = self._max_batch_tokens
        num_preemptions = self.num_preemptions
        scheduled: dict[str, ScheduledSequence] = {}
        # Sorting is stable: decode rows first, each group in order of admission.
        for sequence in sorted(self.running, key=lambda one: one.num_pending > 1):
            if budget == 0:
                break
            if sequence.state is not SequenceState.RUNNING or sequence.is_chosen_out:
                continue
            num_tokens = min(sequence.num_pending, budget)
            if not self._grow(sequence, num_tokens, scheduled):
                continue
            scheduled[sequence.sequence_id] = ScheduledSequence(sequence, num_tokens)
            budget -= num_tokens
        # A step that had to preempt admits nobody: the victim would take its pages straight back.
        if self.num_preemptions == num_preemptions:
            for item in self._admit(budget):
                scheduled[item.sequence.sequence_id] = item
        return sorted(scheduled.values(), key=lambda item: (item.sequence.slot, item.sequence.arrival))

    def oldest_waiters(self) -> dict[str, int]:
        """Arrival of the oldest waiting sequence of each adapter."""
        oldest: dict[str, int] = {}
        for sequence in self.waiting:
            digest = sequence.add.digest
            if digest is not None:
                oldest[digest] = min(sequence.arrival, oldest.get(digest, sequence.arrival))
        return oldest

    def take_unfit(self) -> list[Sequence]:
        """Waiting sequences that turned out never to fit since the last call; the caller finishes them."""
        unfit, self._unfit = self._unfit, []
        return unfit

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence, waiting or running, and give back all that it holds."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
            self._give_back(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        sequence.state = SequenceState.FINISHED

    def max_pages(self, add: Add) -> int:
        """Pages of K and V that a request needs when it runs to its limit."""
        return -(-(len(add.prompt) + add.max_tokens) // self._page_tokens)

    def _grow(self, sequence: Sequence, num_tokens: int, scheduled: dict[str, ScheduledSequence]) -> bool:
        """Find pages for the next `num_tokens`, preempting younger sequences; False when it was preempted itself."""
        needed = self._pages_needed(sequence, num_tokens)
        while not self._pages.can_alloc(needed) and not self._adapters.evict_idle(needed, sequence.arrival):
            victim = max(self.running, key=lambda one: one.arrival)
            scheduled.pop(victim.sequence_id, None)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.pages.extend(self._pages.alloc(needed, PageOwner.KV))
        return True

    def _admit(self, budget: int) -> list[ScheduledSequence]:
        admitted: list[ScheduledSequence] = []
        passed_over: list[Sequence] = []
        while self.waiting and budget > 0 and len(self.running) < self._max_sequences:
            sequence = self.waiting.popleft()
            if sequence.num_in_flight:
                # Preempted while a step held it: its tokens are complete once that step is looked at.
                passed_over.append(sequence)
                continue
            digest = sequence.add.digest
            entry = None
            if digest is not None:
                # Asking again also brings back an adapter that was evicted while the sequence waited.
                entry = self._adapters.prefetch(digest)
                if entry.phase is not AdapterPhase.RESIDENT:
                    passed_over.append(sequence)
                    continue
                if self.max_pages(sequence.add) + entry.num_pages > self._pages.num_pages:
                    self._unfit.append(sequence)
                    passed_over.append(sequence)
                    continue
                sequence.slot = self._adapters.acquire(entry)
            num_tokens = min(sequence.num_pending, budget)
            needed = self._pages_needed(sequence, num_tokens)
            wanted = needed + self._adapters.num_pages_wanted(sequence.arrival)
            if not self._pages.can_alloc(wanted) and not self._adapters.evict_idle(wanted, sequence.arrival):
                if entry is not None:
                    self._adapters.release(entry.digest)
                    sequence.slot = -1
                passed_over.append(sequence)
                break
            sequence.pages = page_list(self._pages.alloc(needed, PageOwner.KV))
            sequence.state = SequenceState.RUNNING
            self.running.append(sequence)
            admitted.append(ScheduledSequence(sequence, num_tokens))
            budget -= num_tokens
        self.waiting.extendleft(reversed(passed_over))
        return admitted

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.num_computed = 0
        sequence.state = SequenceState.WAITING
        self.waiting.appendleft(sequence)
        self.num_preemptions += 1

    def _give_back(self, sequence: Sequence) -> None:
        self._pages.free(sequence.pages)
        sequence.pages = page_list()
        sequence.slot = -1
        if sequence.add.digest is not None:
            self._adapters.release(sequence.add.digest)

    def _pages_needed(self, sequence: Sequence, num_tokens: int) -> int:
        end = sequence.num_computed + num_tokens
        return -(-end // self._page_tokens) - len(sequence.pages)
