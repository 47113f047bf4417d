"""Orders waiting sequences by weighted fairness between shares."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from itertools import islice
from operator import itemgetter

from loramux.engine.protocol.service_tiers import (
    BACKGROUND_RANK,
    FIRST_TIER_LEAD,
    INPUT_PRICE,
    OUTPUT_PRICE,
    TIER_FACTORS,
)
from loramux.engine.scheduling.shares import TOKEN_S, FairShare, ShareHeap, TurnKey, place
from loramux.engine.sequences.sequence import Sequence, ShareKey

MAX_ROUNDS = 64
"""Number of admissions from other shares after which a waiting share can go first, regardless of its counter."""

ROUNDS_PER_SHARE = 4
"""Like MAX_ROUNDS, but per waiting share, for when many shares are waiting. Strict round robin would need 1."""

MAX_COST_RATIO = 16
"""Longest wait of a share with expensive requests, as a multiple of the longest wait with average requests."""

ROUNDS_BETWEEN_CHECKS = 8
"""Number of admissions between two checks for shares that have waited too long."""

MAX_PASSED = 256
"""Maximum number of a share's ready sequences that delay the turn of a cold sequence behind them."""

MAX_IDLE_SHARES = 65536
"""Maximum number of idle shares whose counters are kept."""

_turn_of = itemgetter(0)


class FairQueue:
    """Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", 2024), with weights.

    A share's counter adds up the prices of its input and output tokens, divided by the share's weight. The share with
    the lowest counter goes first. Ties go to the share with the fewest running sequences. When a share becomes active,
    its counter is raised to the lowest counter of the active shares or, if there are none, to the counter of the share
    that was active last. When a share starts to wait again, except after a preemption, its counter is raised to the
    lowest counter of the waiting shares, or to what that was before if it was higher. No share can therefore save up
    credit while idle, or overtake others because a share with a low counter waits again after a preemption.

    Within a share, sequences are ordered by priority, then by arrival, so a sequence of low priority can wait forever.
    Priorities do not affect other shares.

    A share that has waited too long goes before all shares that have not. A wait is too long once two conditions are
    met. First, other shares have had K admissions since the wait began, with K = max(MAX_ROUNDS, ROUNDS_PER_SHARE *
    number of waiting shares). Second, all shares together have since been charged at least ROUNDS_PER_SHARE times the
    amount that a fair order would charge before the share's next request, given its price. For expensive requests, this
    can take more than K admissions, but never more than MAX_COST_RATIO * K. Beyond this bound, a share whose adapter is
    resident and whose pages are available waits for at most ROUNDS_BETWEEN_CHECKS more admissions, plus one for each
    share that has waited at least as long.

    The sequences of a share key in one service tier are a share of their own, whose weight is multiplied by the tier's
    factor. The bound does not hold for tiers that make room for others, because the scheduler keeps them back while
    those wait.

    The order of the first tier uses counters that are lower by FIRST_TIER_LEAD, divided by the share's weight, as in
    borrowed virtual time (Duda and Cheriton, "Borrowed-Virtual-Time scheduling", 1999). Such a share can be served
    earlier than others with the same counter. In the long run, it gets no more than its weight allows.

    Background sequences come after all others. If their share has waited too long, its next sequence is no longer a
    background sequence.

    Sequences that could not begin although their adapter is resident are parked. They get no turn, and so take no place
    in the order from others: sequences that wait for a higher limit, for pages from disk, or for their grammar or its
    next mask. A share that has only parked sequences does not wait, so the bound does not hold for it. Its counter is
    raised when one of them gets turns again, unless that one was preempted.
    """

    def __init__(self) -> None:
        self._active: dict[ShareKey, FairShare] = {}
        # Longest idle first. Counters of idle shares are kept, so that a short idle time does not reset them.
        self._idle: OrderedDict[ShareKey, FairShare] = OrderedDict()
        self._resident: set[str] = set()
        self._by_digest: defaultdict[str, dict[Sequence, None]] = defaultdict(dict)
        # Shares with waiting sequences, longest wait first.
        self._waiting: OrderedDict[FairShare, None] = OrderedDict()
        self._waiting_weight = 0.0
        self._late: dict[FairShare, None] = {}
        self._looked_at = 0
        self._least_active = ShareHeap(_served)
        self._least_waiting = ShareHeap(_served)
        self._heads = {True: ShareHeap(_ready_turn), False: ShareHeap(_cold_turn)}
        # Shares that have changed since the last `order`. `_charged_more` has the shares whose counters rose, and
        # `_changed` has the shares with other changes, such as a new waiting sequence.
        self._changed: dict[FairShare, None] = {}
        self._charged_more: dict[FairShare, None] = {}
        # Waiting shares to update in `_heads`, which only a long queue needs.
        self._outdated: dict[FairShare, None] = {}
        self._last_asked = (0, 0)
        self._last_order: list[Sequence] = []
        self._num_admissions = 0
        self._charged = 0.0
        # Highest value so far of the lowest counter of the waiting shares.
        self._floor = 0.0
        # Counter of the last share that became idle.
        self._last_served = 0.0
        self.num_waiting = 0
        self.num_ready = 0
        self.num_cold = 0
        self.num_waiting_tokens = 0
        self.waiting_by_rank = [0] * (BACKGROUND_RANK + 1)
        """Number of waiting sequences in shares of each rank."""
        self.prompt_tokens_by_rank = [0] * (BACKGROUND_RANK + 1)
        """Number of prompt tokens of the waiting sequences that have never run, by the rank of their share."""

    def add(self, sequence: Sequence) -> None:
        """Enqueue a new or preempted sequence."""
        share = self._activated(sequence)
        if not share.is_waiting and not sequence.has_run:
            self._forfeit_credit(share)
        self._count_tokens(share, sequence, 1)
        self._count_sequence(share, sequence, 1)
        if sequence.add.digest is not None:
            self._by_digest[sequence.add.digest][sequence] = None
        self._insert(share, sequence)

    def remove(self, sequence: Sequence) -> None:
        self._rest(self._take(sequence))

    def set_limit(self, sequence: Sequence, num_tokens: int) -> None:
        """Change the token limit of a waiting sequence without changing its place in the queue."""
        share = self._active[sequence.share_key]
        self._discard(share, sequence)
        self._count_tokens(share, sequence, -1)
        sequence.num_reserved = num_tokens
        self._count_tokens(share, sequence, 1)
        self._insert(share, sequence)

    def park(self, sequence: Sequence) -> None:
        """Give a waiting sequence no turns, because it now `awaits_disk`."""
        share = self._active[sequence.share_key]
        self._discard(share, sequence)
        self._insert(share, sequence)

    def unpark(self, sequence: Sequence) -> None:
        """Give a waiting sequence turns again, unless it still waits for a limit, the disk or a mask."""
        share = self._active[sequence.share_key]
        if not share.is_parked(sequence):
            return
        if not share.is_waiting and not sequence.has_run:
            self._forfeit_credit(share)
        self._discard(share, sequence)
        self._insert(share, sequence)

    def admit(self, sequence: Sequence, num_tokens: int) -> None:
        """Move a sequence from waiting to running and charge its share for `num_tokens` of input."""
        share = self._take(sequence)
        share.num_running += 1
        share.num_admissions += not sequence.has_run
        self._charge(share, INPUT_PRICE * num_tokens)
        self._num_admissions += 1
        if share.is_waiting:
            self._begin_wait(share)

    def charge_outputs(self, sequences: list[Sequence]) -> None:
        """Charge for one more output token of each sequence, running or waiting."""
        for sequence in sequences:
            share = self._active[sequence.share_key]
            share.charged += OUTPUT_PRICE
            share.served += OUTPUT_PRICE / share.weight
            if share.ready or share.cold:
                self._charged_more[share] = None
        self._charged += OUTPUT_PRICE * len(sequences)

    def charge_time(self, share_key: str, seconds: float) -> None:
        """Charge a share for processor time that it used besides its tokens."""
        keys = [(share_key, rank) for rank in range(BACKGROUND_RANK + 1)]
        share = next(filter(None, (shares.get(key) for shares in (self._active, self._idle) for key in keys)), None)
        if share is not None:
            self._charge(share, OUTPUT_PRICE * seconds / TOKEN_S)

    def leave(self, sequence: Sequence) -> None:
        """Remove a running sequence that has ended or been preempted."""
        share = self._active[sequence.share_key]
        share.num_running -= 1
        if share.is_waiting:
            self._changed[share] = None
        self._rest(share)

    @property
    def num_paused(self) -> int:
        """Number of waiting sequences that need a higher limit first."""
        return sum([one.has_reached_limit for share in self._active.values() for one in share.parked])

    @property
    def num_active(self) -> int:
        """Number of shares with waiting or running sequences."""
        return len(self._active)

    def served(self, sequence: Sequence) -> float:
        """The counter of a running or waiting sequence's share."""
        return self._active[sequence.share_key].served

    def heads(self, rank: int) -> list[Sequence]:
        """The next ready sequence of each waiting share of a rank, those of the least served shares first."""
        shares = [share for share in self._waiting if share.rank == rank and share.ready]
        return [share.ready[0] for share in sorted(shares, key=_served)]

    def is_ready(self, sequence: Sequence) -> bool:
        """True if the sequence's adapter is resident."""
        return sequence.add.digest is None or sequence.add.digest in self._resident

    def set_resident(self, digest: str, is_resident: bool) -> None:
        """Mark an adapter as resident or not. Waiting sequences that need it become ready or cold."""
        if is_resident == (digest in self._resident):
            return
        moved: defaultdict[FairShare, list[Sequence]] = defaultdict(list)
        for sequence in self._by_digest.get(digest, ()):
            share = self._active[sequence.share_key]
            if not share.is_parked(sequence):
                moved[share].append(sequence)
        if is_resident:
            self._resident.add(digest)
        else:
            self._resident.discard(digest)
        for share, sequences in moved.items():
            source, target = share.line(not is_resident), share.line(is_resident)
            source[:] = [one for one in source if one.add.digest != digest]
            num_before = len(target)
            for one in sequences:
                (share.parked if self._must_park(one) else target).append(one)
            target.sort(key=place)
            share.parked.sort(key=place)
            self._count_line(is_resident, len(target) - num_before)
            self._count_line(not is_resident, -len(sequences))
            self._changed[share] = None
            if not share.is_waiting:
                self._end_wait(share)

    def order(self, num_ready: int, num_cold: int, is_exact: bool = True) -> list[Sequence]:
        """The first `num_ready` ready and `num_cold` cold sequences, ordered as if each were admitted on its turn.

        If more than `num_ready` sequences are ready, no cold sequence follows the last ready one.

        Takes logarithmic time in the number of shares per returned sequence and per changed share, and almost no time
        if nothing changed. Unless `is_exact`, a share whose counter rose does not count as changed.
        """
        self._look_for_late()
        is_same = self._last_asked == (num_ready, num_cold) and not self._changed
        if is_same and not (is_exact and self._charged_more):
            return self._last_order
        self._outdated.update(
            (share, None) for share in (*self._changed, *self._charged_more) if share in self._waiting
        )
        self._changed.clear()
        self._charged_more.clear()
        if self.num_ready > num_ready or self.num_cold > num_cold:
            self._update_heads()
        ready = self._order(True, num_ready) if self.num_ready else []
        cold = self._order(False, num_cold) if self.num_cold else []
        if 0 < num_ready < self.num_ready:
            # Leave out cold sequences behind the last ready one. Once loaded, such a sequence's adapter would be
            # evicted before use, because the sequence would be ready but not in the order.
            last = ready[-1][0]
            cold = [item for item in cold if item[0] <= last]
        self._last_asked = num_ready, num_cold
        # Sorting the concatenation of two sorted lists takes linear time, like a merge.
        self._last_order = [sequence for _, sequence in sorted(ready + cold, key=_turn_of)]
        return self._last_order

    def shed_candidate(self) -> Sequence | None:
        """The sequence to refuse when the queue is full, or None if every waiting sequence has run before.

        This is the newest of the lowest-priority sequences in the share with the most waiting tokens per weight, among
        the shares of the highest rank. Sequences that have run before have no waiting tokens.
        """
        share = max(self._active.values(), key=_shed_first, default=None)
        if share is None or not share.num_waiting_tokens:
            return None
        lines = (share.ready, share.cold, share.parked)
        # A flood is refused one by one, so this searches from the ends of long lines.
        last = [next((one for one in reversed(line) if not one.has_run), None) for line in lines]
        return max((one for one in last if one is not None), key=place)

    def sequences(self) -> list[Sequence]:
        """All waiting sequences, in no particular order."""
        return [one for share in self._active.values() for one in (*share.ready, *share.cold, *share.parked)]

    def _order(self, is_ready: bool, count: int) -> list[tuple[TurnKey, Sequence]]:
        """The first `count` ready or cold sequences, with their turns. The heads must be current unless that is all."""
        if count >= (self.num_ready if is_ready else self.num_cold):
            # No heap is needed, because each share's turns ascend.
            return sorted(
                [item for share in self._waiting for item in _turns(share, is_ready, self._rounds(share))], key=_turn_of
            )
        # A turn's last element is the arrival number, which is unique, so comparisons never reach later tuple elements.
        heads: list[tuple[TurnKey, Sequence, Iterator[tuple[TurnKey, Sequence]]]] = []
        for share in self._late:
            if share.line(is_ready):
                turns = _turns(share, is_ready, self._rounds(share))
                heads.append((*next(turns), turns))
        heapq.heapify(heads)
        others = self._heads[is_ready].ascending()
        following = next(others, None)
        order: list[tuple[TurnKey, Sequence]] = []
        while len(order) < count:
            # A share's turn in the heap is never later than the first turn that `_turns` yields for it.
            while following is not None and (not heads or following[0] <= heads[0][0]):
                share = following[1]
                if share not in self._late:
                    turns = _turns(share, is_ready, 0)
                    heapq.heappush(heads, (*next(turns), turns))
                following = next(others, None)
            if not heads:
                break
            turn, sequence, turns = heads[0]
            order.append((turn, sequence))
            if following is None and len(heads) == 1:
                # No other shares are left to interleave.
                order += islice(turns, count - len(order))
                break
            after = next(turns, None)
            if after is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (*after, turns))
        return order

    def _update_heads(self) -> None:
        for share in self._outdated:
            for is_ready, heap in self._heads.items():
                if share.line(is_ready):
                    heap.update(share)
                else:
                    heap.discard(share)
        self._outdated.clear()

    def _rounds(self, share: FairShare) -> int:
        """Number of admissions since the share began to wait if it has waited too long, otherwise 0."""
        return self._num_admissions - share.waits_since if share in self._late else 0

    def _look_for_late(self) -> None:
        if self._num_admissions - self._looked_at < ROUNDS_BETWEEN_CHECKS:
            return
        self._looked_at = self._num_admissions
        bound = max(MAX_ROUNDS, ROUNDS_PER_SHARE * len(self._waiting))
        for share in self._waiting:
            rounds = self._num_admissions - share.waits_since
            if rounds < bound:
                # No later share has waited longer.
                break
            fair_wait = share.typical_price * self._waiting_weight / share.weight
            if rounds >= MAX_COST_RATIO * bound or self._charged - share.charged_before >= ROUNDS_PER_SHARE * fair_wait:
                self._late[share] = None
                self._changed[share] = None
                for line in (share.ready, share.cold):
                    if line:
                        line[0].end_background()

    def _charge(self, share: FairShare, price: float) -> None:
        share.charged += price
        self._charged += price
        share.served += price / share.weight
        if share.ready or share.cold:
            self._charged_more[share] = None

    def _forfeit_credit(self, share: FairShare) -> None:
        """Raise the counter of a share that begins to wait, even if it has running sequences. Otherwise, one small
        endless request could save up credit for the share's other requests.
        """
        least = self._least_waiting.least()
        if least is not None:
            self._floor = max(self._floor, least.served)
        share.served = max(share.served, self._floor)

    def _must_park(self, sequence: Sequence) -> bool:
        if sequence.awaits_disk:
            return True
        if sequence.grammar is None or sequence.has_reached_limit:
            return sequence.has_reached_limit
        # The mask after a token in flight is requested once the token is committed.
        lacks_mask = sequence.num_in_flight > 0 or not sequence.grammar.is_ready
        return lacks_mask and self.is_ready(sequence)

    def _insert(self, share: FairShare, sequence: Sequence) -> None:
        if self._must_park(sequence):
            insort(share.parked, sequence, key=place)
            return
        if not share.is_waiting:
            self._begin_wait(share)
            self._waiting_weight += share.weight
            self._least_waiting.update(share)
        is_ready = self.is_ready(sequence)
        insort(share.line(is_ready), sequence, key=place)
        self._count_line(is_ready, 1)
        self._changed[share] = None

    def _discard(self, share: FairShare, sequence: Sequence) -> None:
        if share.is_parked(sequence):
            del share.parked[bisect_left(share.parked, place(sequence), key=place)]
            return
        is_ready = self.is_ready(sequence)
        line = share.line(is_ready)
        index = bisect_left(line, place(sequence), key=place)
        assert line[index] is sequence
        del line[index]
        self._count_line(is_ready, -1)
        self._changed[share] = None
        if not share.is_waiting:
            self._end_wait(share)

    def _end_wait(self, share: FairShare) -> None:
        del self._waiting[share]
        self._late.pop(share, None)
        self._waiting_weight -= share.weight
        self._least_waiting.discard(share)
        self._outdated.pop(share, None)
        for heap in self._heads.values():
            heap.discard(share)

    def _count_line(self, is_ready: bool, change: int) -> None:
        if is_ready:
            self.num_ready += change
        else:
            self.num_cold += change

    def _begin_wait(self, share: FairShare) -> None:
        share.waits_since = self._num_admissions
        share.charged_before = self._charged
        self._waiting[share] = None
        self._waiting.move_to_end(share)
        self._late.pop(share, None)

    def _take(self, sequence: Sequence) -> FairShare:
        share = self._active[sequence.share_key]
        self._discard(share, sequence)
        self._count_tokens(share, sequence, -1)
        self._count_sequence(share, sequence, -1)
        if sequence.add.digest is not None:
            del self._by_digest[sequence.add.digest][sequence]
            if not self._by_digest[sequence.add.digest]:
                del self._by_digest[sequence.add.digest]
        return share

    def _count_tokens(self, share: FairShare, sequence: Sequence, sign: int) -> None:
        # A preempted sequence has already been accepted and only has to be recomputed, so its tokens do not count as
        # waiting.
        if not sequence.has_run:
            # A prediction is kept while the sequence waits.
            num_tokens = sequence.num_reserved + len(sequence.add.prediction)
            share.num_waiting_tokens += sign * num_tokens
            self.num_waiting_tokens += sign * num_tokens

    def _count_sequence(self, share: FairShare, sequence: Sequence, sign: int) -> None:
        self.num_waiting += sign
        self.waiting_by_rank[share.rank] += sign
        if not sequence.has_run:
            self.prompt_tokens_by_rank[share.rank] += sign * sequence.num_prompt

    def _activated(self, sequence: Sequence) -> FairShare:
        key = sequence.share_key
        share = self._active.get(key)
        if share is None:
            share = self._idle.pop(key, None) or FairShare(key)
            least = self._least_active.least()
            share.served = max(share.served, self._last_served if least is None else least.served)
            self._active[key] = share
            self._least_active.update(share)
        weight = max(1, sequence.add.weight) * TIER_FACTORS[sequence.add.service_tier]
        if share.is_waiting and weight != share.weight:
            self._waiting_weight += weight - share.weight
            # The lead of the first tier depends on the weight.
            self._changed[share] = None
        share.weight = weight
        return share

    def _rest(self, share: FairShare) -> None:
        if not share.is_idle:
            return
        self._least_active.discard(share)
        self._idle[share.key] = self._active.pop(share.key)
        self._last_served = share.served
        if len(self._idle) > MAX_IDLE_SHARES:
            self._idle.popitem(last=False)


def _served(share: FairShare) -> TurnKey:
    return (share.served,)


def _shed_first(share: FairShare) -> tuple[bool, int, float]:
    return share.num_waiting_tokens > 0, share.rank, share.num_waiting_tokens / share.weight


def _ready_turn(share: FairShare) -> TurnKey:
    return _turn(share.ready[0], share.served, share.num_running, share.weight)


def _cold_turn(share: FairShare) -> TurnKey:
    return _turn(share.cold[0], share.served, share.num_running, share.weight)


def _turn(sequence: Sequence, served: float, num_running: int, weight: float) -> TurnKey:
    # A share whose counter was raised ties with another share. The share with fewer running sequences goes first.
    if sequence.share_key[1] == 0:
        served -= FIRST_TIER_LEAD / weight
    return 2 if sequence.is_background else 1, served, num_running, sequence.arrival


def _turns(share: FairShare, is_ready: bool, rounds: int) -> Iterator[tuple[TurnKey, Sequence]]:
    """One share's ready or cold sequences, with their turns. Each turn assumes that all earlier sequences are admitted.

    The turn of a cold sequence counts the cold sequences before it and at most MAX_PASSED ready sequences before it.
    The turn of a ready sequence counts only the ready sequences before it, so waiting for an adapter delays no ready
    sequence. `rounds` is the number of admissions since the share began to wait if it has waited too long, otherwise 0.
    """
    served, num_running, weight = share.served, share.num_running, share.weight
    passed = iter(()) if is_ready else islice(share.ready, MAX_PASSED)
    before = next(passed, None)
    for sequence in share.line(is_ready):
        own_place = place(sequence)
        while before is not None and place(before) < own_place:
            served += INPUT_PRICE * before.num_tokens / weight
            num_running += 1
            # An admission ends the share's long wait.
            rounds = 0
            before = next(passed, None)
        if rounds:
            yield (0, -rounds, 0, sequence.arrival), sequence
        else:
            yield _turn(sequence, served, num_running, weight), sequence
        served += INPUT_PRICE * sequence.num_tokens / weight
        num_running += 1
        rounds = 0
