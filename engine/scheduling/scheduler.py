"""Chooses the sequences of each step: continuous batching with chunked prefill under one token budget."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from dataclasses import dataclass
from operator import attrgetter

import msgspec

from loramux.engine.adapters.adapter_load import AdapterLoad, AdapterPhase
from loramux.engine.adapters.adapter_pool import NOT_SHORT, AdapterPool, PoolDemand
from loramux.engine.pages.kv_pages import NO_PREFIX, RUNNING, KvPages, Prefix
from loramux.engine.protocol.messages import TierLoad
from loramux.engine.protocol.service_tiers import BACKGROUND_RANK, makes_room
from loramux.engine.scheduling.fair_queue import FairQueue
from loramux.engine.scheduling.shares import place
from loramux.engine.sequences.batch import ScheduledSequence
from loramux.engine.sequences.sequence import Sequence, SequenceState

NEW_SHARE = 4
"""`1 / NEW_SHARE` of the rows that are not used for decoding is reserved for sequences that could start, and for other
prompts than the first. A prompt that does not fit there begins in chunks if it has at most `1 / NEW_SHARE` of the
tokens that are left of each unfinished one.
"""

BACKGROUND_SHARE = 16
"""`1 / BACKGROUND_SHARE` of a step's rows are the most for background sequences while other sequences run, so that a
new request does not wait for a long step.
"""

QUIET_STEPS = 100
"""Number of steps without other sequences after which background sequences fill the step."""

MAX_YIELDS = 16
"""Maximum number of consecutive steps in which running background sequences do not take part, or which are given up,
because of others.
"""

_row_place = attrgetter("row_place")
_rank = attrgetter("rank")


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits a step to `max_batch_tokens` rows, and the engine to `max_sequences` running sequences.

    Adapters are loaded in advance for the first `look_ahead` cold sequences (see `FairShare.cold`).
    """

    max_batch_tokens: int
    max_sequences: int
    look_ahead: int


class _Lane(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The background sequences, or all others."""

    decoding: list[Sequence]
    """Running sequences whose next row is a decode row, in order of admission."""
    prompts: list[Sequence]
    """Running sequences whose prompt is not yet computed, by rank, then in order of admission."""
    waiting: list[tuple[int, Sequence]]
    """Waiting sequences by turn, each with its position among all waiting sequences."""

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prompts)


class Scheduler:
    """Waiting and running sequences of one engine. `adapters` reports to `queue` which adapters are resident.

    Decode rows come first, then chunks of running prompts, then new sequences by turn. Running prompts leave part of
    the step to new sequences, so that a short prompt does not wait for a long one. A sequence whose adapter is still
    loading is skipped, and one whose cached pages are read from disk is parked. Neither blocks other sequences. When a
    running sequence needs a page and none is left, a sequence is preempted, to be recomputed later. The victim has the
    worst service tier, and is a stalled sequence of that tier if there is one. It comes from the share with the highest
    counter. Ties go to the share with the youngest sequence. Within the share, it is the youngest of the sequences with
    the lowest priority.

    A sequence that waits for its next mask takes no slot, but it has pages. If it is stalled (`Sequence.is_stalled`), a
    waiting sequence of another tenant can get them. Its tenant then pays for the tokens that are computed again.

    Background sequences use what the others leave free. They take no part in a step that computes another sequence's
    prompt, and have few rows while others run, but those they get at least once in MAX_YIELDS + 1 steps. They are
    preempted first for pages, and also when that gives another sequence a sequence slot, or its adapter room. Sequences
    of the last tier are preempted when that gives a sequence of the first tier a slot or pages, or its adapter room.
    """

    def __init__(self, queue: FairQueue, kv: KvPages, adapters: AdapterPool, limits: SchedulerLimits) -> None:
        self.queue = queue
        self._kv = kv
        self._adapters = adapters
        self.limits = limits
        self.running: list[Sequence] = []
        """In order of admission."""
        self.running_by_rank = [0] * (BACKGROUND_RANK + 1)
        """Number of running sequences of each rank."""
        # The running sequences in the order of their rows.
        self._by_row: list[Sequence] = []
        self._order: list[Sequence] = []
        # The active sequences, or None if they may have changed since they were last listed.
        self._known_active: list[Sequence] | None = None
        # Page shortage in the last step: whether a running sequence had to wait for pages, and the first sequence that
        # was not admitted for lack of pages.
        self._is_short = False
        self._short_of_pages: Sequence | None = None
        # Sequences that need more pages, including the pages of their adapters, than the pool can provide.
        self._unfit: list[Sequence] = []
        self._misstated: list[Sequence] = []
        # Waiting sequences that get no turn until their cached pages have been read from disk.
        self._awaiting_disk: list[Sequence] = []
        self.num_preemptions = 0
        self.num_ended = 0
        """Number of sequences that ended while they were running."""
        # Steps since the last one in which another than a background sequence ran or waited.
        self._num_quiet_steps = QUIET_STEPS
        self._num_yields = 0
        # The same before the last step was scheduled.
        self._num_yields_before = 0

    @property
    def has_work(self) -> bool:
        return bool(self.queue.num_waiting or self.running)

    @property
    def is_short_of_pages(self) -> bool:
        """True if a sequence had to wait for pages in the last step."""
        return self._is_short or self._short_of_pages is not None

    def add(self, sequence: Sequence) -> None:
        self.queue.add(sequence)
        if sequence.add.digest is not None and self.queue.num_cold <= self.limits.look_ahead:
            self._adapters.prefetch(sequence.add.digest)

    def order_waiting(self) -> PoolDemand:
        """Order the waiting sequences for the next `schedule`, and return what they need from the adapter pool."""
        self._known_active = None
        if self._awaiting_disk:
            self._unpark_read()
        num_free_slots = self._num_free_slots()
        num_behind, num_flex = self.running_by_rank[BACKGROUND_RANK], self._num_yielding_to_first()
        # While no sequence can start, the order only decides which adapters are loaded next.
        is_exact = num_free_slots + num_behind + num_flex > 0
        self._order = self.queue.order(self.limits.max_sequences, self.limits.look_ahead, is_exact=is_exact)
        if self.queue.waiting_by_rank[0]:
            self._order = self._with_first_tier(self._order)
            if any(one.rank == 0 and self._needs_only_room(one) for one in self._order):
                # Otherwise, sequences of the last tier, which are kept back, would keep idle adapters and pages.
                self._order = sorted(self._order, key=_makes_room_for_first)
        if num_behind:
            # Background sequences leave their slots to others.
            num_ahead = sum([not one.is_background for one in self._order])
            num_free_slots = max(num_free_slots, min(num_ahead, num_free_slots + num_behind))
        if num_flex:
            num_first = sum([one.rank == 0 for one in self._order])
            num_free_slots = max(num_free_slots, min(num_first, num_free_slots + num_flex))
        queue_positions: dict[str, int] = {}
        for position, sequence in enumerate(self._order):
            if sequence.add.digest is not None and sequence.add.digest not in queue_positions:
                queue_positions[sequence.add.digest] = position
                # This also reloads an adapter that was evicted while the sequence was waiting.
                self._adapters.prefetch(sequence.add.digest)
        return PoolDemand(queue_positions, self._short_position(), num_free_slots, len(self.running))

    def schedule(self) -> list[ScheduledSequence]:
        """Choose the next step's sequences, grouped by adapter. The list is empty if nothing can run."""
        has_vacated = self._make_room_for_adapters()
        self._is_short, self._short_of_pages = False, None
        scheduled: dict[Sequence, ScheduledSequence] = {}
        ahead, behind = self._lanes()
        num_behind = behind.num_running
        num_free_slots = max(0, self.limits.max_sequences - ahead.num_running - num_behind)
        is_due = num_behind > 0 and self._num_yields >= MAX_YIELDS
        kept = self._few_rows if is_due else 0
        max_rows = self.limits.max_batch_tokens
        can_free_slots = num_behind > 0 or self._num_yielding_to_first() > 0
        budget = self._fill(scheduled, ahead, max_rows - kept, num_free_slots, can_free_slots=can_free_slots) + kept
        self._num_quiet_steps = 0 if ahead.num_running or ahead.waiting else self._num_quiet_steps + 1
        num_ahead = len(scheduled)
        if has_vacated:
            # Otherwise, the victim would immediately take its place back.
            behind.waiting.clear()
        if num_behind or behind.waiting:
            budget = min(budget, self._background_budget(scheduled, is_due))
            self._fill(scheduled, behind, budget, self._num_free_slots(), can_free_slots=False)
        yields = num_behind > 0 and len(scheduled) == num_ahead
        self._num_yields_before = self._num_yields
        self._num_yields = self._num_yields + 1 if yields else 0
        return [scheduled[one] for one in self._by_row if one in scheduled]

    @property
    def can_give_up(self) -> bool:
        """True if the last step can be given up although background sequences take part in it."""
        return self._num_yields_before < MAX_YIELDS

    def give_up(self) -> None:
        """Note that the last step was given up. Its background sequences have yielded once more.

        A sequence that was admitted in it, or that has waited in it for a prefix, counts as such: only the order of
        background shares suffers.
        """
        self._num_yields = self._num_yields_before + 1

    def loads(self) -> list[TierLoad]:
        """The load of each rank."""
        left = [*self.queue.prompt_tokens_by_rank]
        for sequence in self.running:
            left[sequence.rank] += max(0, sequence.num_prompt - max(sequence.num_computed, sequence.num_reached))
        counts = zip(self.running_by_rank, self.queue.waiting_by_rank, left, strict=True)
        return [TierLoad(num_running=one, num_waiting=other, prompt_tokens=tokens) for one, other, tokens in counts]

    def take_unfit(self) -> list[Sequence]:
        """Return waiting sequences found too large for the pool since the last call. The caller must end them."""
        unfit, self._unfit = self._unfit, []
        return unfit

    def take_misstated(self) -> list[Sequence]:
        """Return waiting sequences whose `vocab_size` or `num_labels` is wrong for their adapter. The caller must end
        them.
        """
        misstated, self._misstated = self._misstated, []
        return misstated

    def advance(self, scheduled: list[ScheduledSequence]) -> None:
        """Count the tokens of a submitted step as computed."""
        for item in scheduled:
            sequence = item.sequence
            sequence.num_computed = num_computed = sequence.num_computed + item.num_tokens
            if num_computed > sequence.num_reached:
                sequence.num_reached = num_computed
            # Most steps fill no page and free none.
            if num_computed >= sequence.next_offer:
                self._kv.offer(sequence)

    def room_for_drafts(self, sequence: Sequence, num_drafts: int) -> int:
        """Find pages for drafts after a decode row of this step. Returns the number of drafts with room.

        Drafts never take a page that another sequence has to wait for: they leave a page of each group of layers to
        each running sequence. They may take the pages of cached prefixes, because a pool in use has few free pages, and
        the sequence soon needs a page for its next tokens anyway. In a hybrid decoder, the state is copied, too.
        """
        num_kept = len(self.running) * self._kv.num_groups
        if not self._kv.grow(sequence, 1 + num_drafts, num_kept=num_kept):
            num_drafts = sequence.num_room - sequence.num_computed - 1
        return num_drafts if num_drafts > 0 and self._kv.save_state(sequence) else 0

    def note_accepted(self, sequence: Sequence) -> None:
        """The K and V of accepted drafts count as computed."""
        if sequence.num_computed >= sequence.next_offer:
            self._kv.offer(sequence)

    def settle_state(self, sequence: Sequence, num_accepted: int) -> bool:
        """Free the copy of a hybrid decoder's state after a step with drafts.

        Returns True if the state has gone back to before the step, because some drafts were rejected. The rows of the
        sequence's own token and of the accepted drafts must then be repeated.
        """
        if not sequence.saved_state:
            return False
        has_rejected = num_accepted < sequence.num_drafted
        self._kv.settle_state(sequence, has_rejected=has_rejected)
        return has_rejected

    def set_limit(self, sequence: Sequence, num_tokens: int) -> None:
        if sequence.state is SequenceState.WAITING:
            self.queue.set_limit(sequence, num_tokens)
        else:
            sequence.num_reserved = num_tokens

    def finish(self, sequence: Sequence, is_broken: bool = False) -> None:
        """Remove a waiting or running sequence and free its resources. If `is_broken`, also remove its pages from the
        prefix cache.
        """
        if sequence.state is SequenceState.RUNNING:
            self._remove_running(sequence)
            self.num_ended += 1
            if is_broken:
                self._kv.disown(sequence)
            else:
                self._kv.offer(sequence)
            self._give_back(sequence)
            self.queue.leave(sequence)
        elif sequence.state is SequenceState.WAITING:
            self.queue.remove(sequence)
            if is_broken:
                # It was preempted while the step with the fault was in flight.
                self._kv.disown(sequence)
        sequence.state = SequenceState.FINISHED

    def max_tokens(self, num_adapter_pages: int = 0, digest: str | None = None) -> int:
        """Maximum number of tokens of one request that fit in the pool next to its adapter and the pinned adapters."""
        return self._kv.max_tokens(self._adapters.num_pages_beside(digest, num_adapter_pages))

    def _fill(
        self,
        scheduled: dict[Sequence, ScheduledSequence],
        lane: _Lane,
        budget: int,
        num_free_slots: int,
        *,
        can_free_slots: bool,
    ) -> int:
        """Add a lane's sequences to the step: decode rows first, then prompts, each in order of admission, then waiting
        sequences. Returns what is left of `budget`.

        With `can_free_slots`, sequences can begin although `num_free_slots` is 0.
        """
        num_preemptions, num_before = self.num_preemptions, len(scheduled)
        max_sequences = self.limits.max_sequences
        max_scheduled = min(num_before + budget, max_sequences)
        for sequence in lane.decoding:
            if len(scheduled) >= max_scheduled:
                break
            # Most sequences have room on their last page. A sequence that has just been preempted has no page.
            if sequence.num_computed < sequence.num_room or self._grow(sequence, 1, scheduled):
                scheduled[sequence] = ScheduledSequence(sequence, 1)
        budget -= len(scheduled) - num_before
        # Rows that the first running prompt leaves to others, so that a short prompt does not wait for a long one.
        kept = 0
        if lane.prompts and (
            len(lane.prompts) > 1
            or ((num_free_slots or can_free_slots) and any(self.queue.is_ready(one) for _, one in lane.waiting))
        ):
            kept = budget // NEW_SHARE
        for sequence in lane.prompts:
            num_tokens = min(sequence.num_computable, budget - kept)
            if num_tokens <= 0 or len(scheduled) >= max_sequences:
                break
            if self._grow(sequence, num_tokens, scheduled):
                scheduled[sequence] = ScheduledSequence(sequence, num_tokens)
                budget -= num_tokens
                if num_tokens < sequence.num_computable:
                    # The next prompts leave half of this to new sequences: see `_fill_up`.
                    kept //= 2
        # After a preemption, admit no sequence in this step. Otherwise, the victim would immediately take its pages
        # back.
        if self.num_preemptions == num_preemptions and not self.is_short_of_pages:
            chunks = [scheduled.get(one) or ScheduledSequence(one, 0) for one in lane.prompts]
            unfinished = [item for item in chunks if item.num_tokens < item.sequence.num_computable]
            for item in self._admit(scheduled, lane.waiting, budget, num_free_slots, unfinished, can_free_slots):
                scheduled[item.sequence] = item
                budget -= item.num_tokens
            if unfinished:
                budget = self._fill_up(scheduled, lane, budget)
        return budget

    @property
    def _few_rows(self) -> int:
        """Maximum number of rows for background sequences while others run."""
        return max(1, self.limits.max_batch_tokens // BACKGROUND_SHARE)

    def _background_budget(self, scheduled: dict[Sequence, ScheduledSequence], is_due: bool) -> int:
        """Maximum number of rows for background sequences in a step with these other sequences. `is_due` is True if
        they have yielded for long enough.
        """
        has_prompts = any(
            item.num_tokens > 1 or item.sequence.num_tokens == item.sequence.num_prompt for item in scheduled.values()
        )
        if has_prompts and not is_due:
            return 0
        return self.limits.max_batch_tokens if self._num_quiet_steps >= QUIET_STEPS else self._few_rows

    def _make_room_for_adapters(self) -> bool:
        """Preempt sequences if that gives the first staged adapter a slot or pages, and a sequence for which they make
        room waits for it or for a staged adapter behind it. Returns True if any was preempted.
        """
        if not self.running_by_rank[BACKGROUND_RANK] and not self._num_yielding_to_first():
            return False
        first: tuple[int, AdapterLoad] | None = None
        best_rank = BACKGROUND_RANK
        for position, sequence in enumerate(self._order):
            if sequence is self._short_of_pages:
                # Adapters behind it get no pages.
                break
            load = None if sequence.add.digest is None else self._adapters.find(sequence.add.digest)
            if load is not None and load.phase is AdapterPhase.STAGED:
                first = first or (position, load)
                best_rank = min(best_rank, sequence.rank)
        # Pages may become available once the copy is finished.
        if first is None or self._is_short or self._adapters.is_copying:
            return False
        position, load = first
        yielding = self._making_room_for(best_rank)
        if not self._adapters.has_slot:
            return self._vacate_adapter(yielding)
        can_make_room = self._adapters.reclaimer.can_make_room
        if can_make_room(load.num_pages, position):
            return False
        if not can_make_room(load.num_pages - self._num_pages_of(yielding, load.digest), position):
            return False
        self.preempt(yielding[0])
        return True

    def _vacate_adapter(self, yielding: list[Sequence]) -> bool:
        """Preempt all sequences of the adapter with the fewest users, of those that only `yielding` sequences use.
        Returns False if there is none.
        """
        load = min(self._adapters_of(yielding), key=lambda one: one.num_users, default=None)
        if load is None:
            return False
        for sequence in [one for one in self.running if one.slot == load.slot]:
            self.preempt(sequence)
        return True

    def _vacate_slot(self, rank: int) -> Sequence | None:
        """Preempt the sequence that was admitted last, among those of the worst rank that have slots and make room for
        `rank`. Returns the preempted sequence, or None if there is none.
        """
        candidates = (one for one in reversed(self._active()) if makes_room(one.rank, rank))
        victim = max(candidates, key=_rank, default=None)
        if victim is not None:
            self.preempt(victim)
        return victim

    def _yielding(self, sequence: Sequence) -> list[Sequence]:
        """The running sequences that are preempted if a waiting sequence needs their pages, the first victim first."""

        def yields(one: Sequence) -> bool:
            if makes_room(one.rank, sequence.rank):
                return True
            return one.rank >= sequence.rank and one.is_stalled and one.add.share_key != sequence.add.share_key

        return sorted([one for one in reversed(self.running) if yields(one)], key=_rank, reverse=True)

    def _making_room_for(self, rank: int) -> list[Sequence]:
        """The running sequences that make room for waiting ones of this rank, the first victim first."""
        candidates = [one for one in reversed(self.running) if makes_room(one.rank, rank)]
        return sorted(candidates, key=_rank, reverse=True)

    def _adapters_of(self, yielding: list[Sequence]) -> list[AdapterLoad]:
        """The adapters that only these sequences use."""
        num_users = Counter(one.slot for one in yielding if one.slot >= 0)
        loads = map(self._adapters.in_slot, num_users)
        return [load for load in loads if load.num_users == num_users[load.slot]]

    def _num_pages_of(self, yielding: list[Sequence], digest: str | None) -> int:
        """Number of pages that preempting these sequences makes available to a sequence with the adapter `digest`, or
        more if they share pages.
        """
        num_pages = sum(self._kv.num_pages(one) for one in yielding)
        own = None if digest is None else self._adapters.find(digest)
        return num_pages + sum(load.num_pages for load in self._adapters_of(yielding) if load is not own)

    def _fill_up(self, scheduled: dict[Sequence, ScheduledSequence], lane: _Lane, budget: int) -> int:
        """Give rows that new sequences did not use to the running prompts. The first comes last, because it has most of
        the step already. Returns what is left of `budget`.
        """
        for sequence in lane.prompts[1:] + lane.prompts[:1]:
            item = scheduled.get(sequence)
            if not sequence.is_running or (item is None and len(scheduled) >= self.limits.max_sequences):
                continue
            num_before = 0 if item is None else item.num_tokens
            extra = min(sequence.num_computable - num_before, budget)
            if extra > 0 and self._kv.grow(sequence, num_before + extra):
                scheduled[sequence] = ScheduledSequence(sequence, num_before + extra)
                budget -= extra
        return budget

    def _grow(self, sequence: Sequence, num_tokens: int, scheduled: dict[Sequence, ScheduledSequence]) -> bool:
        """Find pages for a sequence's next tokens, preempting sequences if necessary.

        Returns False if the sequence has to wait or was preempted itself.
        """
        if sequence.state is not SequenceState.RUNNING:
            return False
        while not self._kv.grow(sequence, num_tokens):
            if self._adapters.is_copying:
                # Pages become available once the copy is finished, so there is no need to preempt and recompute a
                # sequence.
                self._is_short = True
                return False
            victim = self._victim()
            scheduled.pop(victim, None)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _victim(self) -> Sequence:
        worst = max(one.rank for one in self.running)
        candidates = [one for one in self.running if one.rank == worst]
        candidates = [one for one in candidates if one.is_stalled] or candidates
        last = max(candidates, key=lambda one: (self.queue.served(one), one.arrival))
        return max((one for one in candidates if one.share_key == last.share_key), key=place)

    def _active(self) -> list[Sequence]:
        """The running sequences that take a slot: those that neither are paused nor wait for a mask. If all slots are
        taken when such a sequence resumes, it waits for a free one.
        """
        if self._known_active is None:
            # Most sequences have no grammar, and reading a property takes longer than the rest of the condition.
            self._known_active = [
                one
                for one in self.running
                if one.num_tokens < one.num_reserved and (one.grammar is None or not one.waits_for_mask)
            ]
        return self._known_active

    def _lanes(self) -> tuple[_Lane, _Lane]:
        """Divide the active and the waiting sequences into background sequences, which come second, and all others."""
        running, waiting = self._active(), list(enumerate(self._order))
        background = [one for one in self._order if one.is_background]
        if not background and not self.running_by_rank[BACKGROUND_RANK]:
            return _lane(running, waiting), _Lane([], [], [])
        ahead, behind = (
            _lane(
                [one for one in running if one.is_background is is_background],
                [item for item in waiting if item[1].is_background is is_background],
            )
            for is_background in (False, True)
        )
        return ahead, behind

    def _num_free_slots(self) -> int:
        # After sequences that were paused have resumed, more than `max_sequences` can be active.
        return max(0, self.limits.max_sequences - len(self._active()))

    def _unpark_read(self) -> None:
        """Give turns again to sequences whose pages have been read from disk, or do not come in time."""
        waiting, self._awaiting_disk = self._awaiting_disk, []
        for sequence in waiting:
            if self._kv.is_reading(sequence):
                self._awaiting_disk.append(sequence)
                continue
            sequence.awaits_disk = False
            if sequence.state is SequenceState.WAITING:
                self.queue.unpark(sequence)

    def _needs_only_room(self, sequence: Sequence) -> bool:
        """True if a waiting sequence's adapter is resident, or waits for a slot and pages."""
        if self.queue.is_ready(sequence):
            return True
        load = None if sequence.add.digest is None else self._adapters.find(sequence.add.digest)
        return load is not None and load.phase is AdapterPhase.STAGED

    def _with_first_tier(self, order: list[Sequence]) -> list[Sequence]:
        """Add sequences of the first tier that come too late in the order, if sequences of the last tier make room for
        them or are kept back.
        """
        last = BACKGROUND_RANK - 1
        num_yielding = self.running_by_rank[last] + sum([one.rank == last for one in order])
        num_missing = min(num_yielding, self.queue.waiting_by_rank[0]) - sum([one.rank == 0 for one in order])
        if num_missing <= 0:
            return order
        known = set(order)
        return [*order, *[one for one in self.queue.heads(0) if one not in known][:num_missing]]

    def _num_yielding_to_first(self) -> int:
        """Number of running sequences of the last tier if a sequence of the first waits, otherwise 0."""
        return self.running_by_rank[BACKGROUND_RANK - 1] if self.queue.waiting_by_rank[0] else 0

    def _short_position(self) -> int:
        if self._is_short:
            return RUNNING
        if self._short_of_pages is None:
            return NOT_SHORT
        positions = (position for position, sequence in enumerate(self._order) if sequence is self._short_of_pages)
        return next(positions, NOT_SHORT)

    def _admit(
        self,
        scheduled: dict[Sequence, ScheduledSequence],
        waiting: list[tuple[int, Sequence]],
        budget: int,
        num_free_slots: int,
        unfinished: list[ScheduledSequence],
        can_free_slots: bool,
    ) -> list[ScheduledSequence]:
        """Admit waiting sequences. `unfinished` are chunks of prompts that this step does not finish: see
        `_longest_rest`. Sequences that make room for new ones are removed from `scheduled`.
        """
        admitted: list[ScheduledSequence] = []
        has_copied = False
        has_first = self.queue.waiting_by_rank[0] > 0 and any(
            one.rank == 0 and self.queue.is_ready(one) for _, one in waiting
        )
        for position, sequence in waiting:
            if budget == 0 or (num_free_slots == 0 and (sequence.is_background or not can_free_slots)):
                break
            # A sequence of the last tier would lose its place to one of the first at once. Behind a sequence that is
            # short of pages, only those of the first tier can begin, because only they get pages from others.
            if has_first and (makes_room(sequence.rank, 0) or (sequence.rank and self._short_of_pages is not None)):
                continue
            # Skip a sequence that was preempted or paused with a step in flight, because its tokens are incomplete
            # until that step is committed.
            if sequence.state is not SequenceState.WAITING or sequence.num_in_flight or sequence.has_reached_limit:
                continue
            # Its adapter may have become resident after the sequences were ordered.
            if sequence.grammar is not None and not sequence.grammar.is_ready:
                continue
            entry = None
            if sequence.add.digest is not None:
                entry = self._adapters.find(sequence.add.digest)
                if entry is None or entry.phase is not AdapterPhase.RESIDENT:
                    continue
                if self._adapters.must_yield_slot(entry, position):
                    continue
                if entry.vocab_size != sequence.add.vocab_size or entry.num_labels != sequence.add.num_labels:
                    self._misstated.append(sequence)
                    continue
                if sequence.num_paged > self.max_tokens(entry.num_pages, entry.digest):
                    self._unfit.append(sequence)
                    continue
            if unfinished:
                # A long prompt has hundreds of pages, and may wait for many steps.
                num_needed = sequence.num_tokens - _longest_rest(sequence, unfinished, budget)
                if num_needed > 0 and not self._kv.may_have_prefix(sequence, num_needed):
                    continue
            prefix = self._find_prefix(sequence, entry, position, budget)
            if self._kv.awaits_disk(sequence, prefix):
                sequence.awaits_disk = True
                self.queue.park(sequence)
                self._awaiting_disk.append(sequence)
                continue
            # Copies of cached pages take time of the step, like tokens. Only the first sequence with copies may take
            # more than is left, so that it can begin at all.
            num_copied = self._kv.copy_tokens(prefix)
            if num_copied > budget and has_copied:
                continue
            room = max(1, budget - num_copied)
            if unfinished and sequence.num_tokens - prefix.num_tokens > _longest_rest(sequence, unfinished, room):
                continue
            if admitted and self._waits_for_prefix(sequence, prefix, admitted):
                # Later sequences would take its slot and pages.
                break
            if num_free_slots == 0 and (victim := self._vacate_slot(sequence.rank)) is not None:
                scheduled.pop(victim, None)
                num_free_slots = self._num_free_slots()
                # The victim's pages are cached now, and may be pages that the prefix would copy from host memory.
                prefix = self._find_prefix(sequence, entry, position, budget)
            if num_free_slots == 0 and has_first and self._num_yielding_to_first():
                # A sequence behind this one can still get a slot.
                continue
            if num_free_slots == 0:
                break
            item = self._begin(sequence, entry, prefix, position, room)
            if item is None and not sequence.is_background and not self._adapters.is_copying:
                num_pages = self._num_pages_to_begin(sequence, entry, prefix, position, room)
                yielding = self._yielding(sequence)
                if self._adapters.can_spare(num_pages - self._num_pages_of(yielding, sequence.add.digest), position):
                    for victim in yielding:
                        self.preempt(victim)
                        scheduled.pop(victim, None)
                        prefix = self._find_prefix(sequence, entry, position, budget)
                        item = self._begin(sequence, entry, prefix, position, room)
                        if item is not None:
                            break
            if item is None:
                self._short_of_pages = self._short_of_pages or sequence
                if has_first and sequence.rank and self._num_yielding_to_first():
                    continue
                break
            admitted.append(item)
            if item.num_tokens < sequence.num_computable:
                unfinished.append(item)
            budget = max(0, budget - item.num_tokens - num_copied)
            has_copied |= num_copied > 0
            num_free_slots -= 1
        return admitted

    def _find_prefix(self, sequence: Sequence, entry: AdapterLoad | None, position: int, budget: int) -> Prefix:
        """The cached prefix with which a waiting sequence begins.

        A checkpoint is in the pool beside the state until it is copied. If both do not fit, but the whole sequence fits
        without the prefix, the prefix is not used.
        """

        def fits(prefix: Prefix, num_tokens: int) -> bool:
            num_pages = self._num_pages_to_begin(sequence, entry, prefix, position, num_tokens)
            return self._adapters.can_spare(num_pages, position)

        prefix = self._kv.find_prefix(sequence)
        if prefix.checkpoint and not fits(prefix, budget) and fits(NO_PREFIX, sequence.num_tokens):
            return NO_PREFIX
        return prefix

    def _waits_for_prefix(self, sequence: Sequence, prefix: Prefix, admitted: list[ScheduledSequence]) -> bool:
        """True if sequences that begin in this step compute most of this one's prompt, such as other choices of it. In
        the next step, that part is in the prefix cache. A sequence waits for that at most once.
        """
        if sequence.has_waited_for_prefix:
            return False
        sequence.has_waited_for_prefix = any(
            self._kv.computes_most(item.sequence, item.num_tokens, sequence, prefix) for item in admitted
        )
        return sequence.has_waited_for_prefix

    def _begin(
        self, sequence: Sequence, entry: AdapterLoad | None, prefix: Prefix, position: int, budget: int
    ) -> ScheduledSequence | None:
        """Start a waiting sequence with at most `budget` tokens. If there is no room, do nothing and return None."""
        if not self._adapters.can_spare(self._num_pages_to_begin(sequence, entry, prefix, position, budget), position):
            return None
        num_pending = sequence.num_tokens - prefix.num_tokens
        num_held = _num_held(sequence, prefix, budget)
        if entry is not None:
            sequence.slot = self._adapters.acquire(entry)
        self._kv.attach(sequence, prefix, position)
        has_room = self._kv.grow(sequence, num_held, position)
        assert has_room
        self._kv.restore_state(sequence, prefix)
        self.queue.admit(sequence, 0 if sequence.has_run and not sequence.pays_again else num_pending)
        sequence.state = SequenceState.RUNNING
        sequence.row_place = sequence.slot, sequence.arrival
        self.running.append(sequence)
        self._known_active = None
        self.running_by_rank[sequence.rank] += 1
        insort(self._by_row, sequence, key=_row_place)
        if not sequence.has_run:
            sequence.num_cached = sequence.num_computed
        return ScheduledSequence(sequence, min(sequence.num_computable, budget))

    def _num_pages_to_begin(
        self, sequence: Sequence, entry: AdapterLoad | None, prefix: Prefix, position: int, budget: int
    ) -> int:
        num_pages = self._kv.num_pages_to_begin(prefix, _num_held(sequence, prefix, budget))
        return num_pages + self._adapters.num_pages_lost_by_using(entry, position)

    def repeat_last(self, sequence: Sequence) -> None:
        """Have a later step compute the last token of a running sequence again, or preempt it if that is impossible."""
        if not self._kv.forget_last(sequence):
            self.preempt(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Return a running sequence to the queue. Its tokens are computed again when it is admitted."""
        sequence.pays_again = sequence.is_stalled
        self._remove_running(sequence)
        self._kv.offer(sequence)
        self._give_back(sequence)
        sequence.state = SequenceState.WAITING
        sequence.disk_wait = None
        # Add before leaving. Otherwise, a share without other sequences would be idle in between and lose its place.
        self.queue.add(sequence)
        self.queue.leave(sequence)
        self.num_preemptions += 1

    def _remove_running(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._known_active = None
        self._by_row.remove(sequence)
        self.running_by_rank[sequence.rank] -= 1

    def _give_back(self, sequence: Sequence) -> None:
        self._kv.detach(sequence)
        if sequence.slot >= 0:
            self._adapters.release(sequence.slot)
        sequence.slot = -1


def _makes_room_for_first(sequence: Sequence) -> bool:
    return makes_room(sequence.rank, 0)


def _num_held(sequence: Sequence, prefix: Prefix, budget: int) -> int:
    """Number of tokens for which a sequence that begins needs pages."""
    num_pending = sequence.num_tokens - prefix.num_tokens
    # A preempted sequence resumes only if there is room for all its tokens, so that it gets further than before.
    return num_pending if sequence.has_run else min(num_pending, budget)


def _longest_rest(sequence: Sequence, unfinished: list[ScheduledSequence], room: int) -> int:
    """Maximum number of tokens, after its cached prefix, with which a waiting sequence can begin in a step that has
    `room` tokens left and does not finish the prompts of `unfinished`, which is not empty.

    If not all tokens fit, it begins in chunks. Prompts that make room for it do not count. It can always begin if no
    others are left. Otherwise, the rest of each of them must be NEW_SHARE times as long, so that few prompts are
    unfinished at once.
    """
    others = [item for item in unfinished if not makes_room(item.sequence.rank, sequence.rank)]
    if not others:
        return sequence.num_tokens
    return max(room, min(item.sequence.num_pending - item.num_tokens for item in others) // NEW_SHARE)


def _lane(running: list[Sequence], waiting: list[tuple[int, Sequence]]) -> _Lane:
    prompts = [one for one in running if one.num_tokens - one.num_computed != 1]
    # Most steps have no prompts.
    decoding = [one for one in running if one.num_tokens - one.num_computed == 1] if prompts else running
    if len(prompts) > 1:
        prompts.sort(key=_rank)
    return _Lane(decoding, prompts, waiting)
