"""Whose turn it is: waiting sequences in a weighted fair order over shares."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from itertools import islice
from operator import itemgetter

from loramux.engine.scheduling.shares import INPUT_PRICE, OUTPUT_PRICE, Share, ShareHeap, Turn, place
from loramux.engine.sequence import Sequence

MAX_ROUNDS = 64
"""Admissions of others after which a share that waits goes first, whatever it was served before."""

ROUNDS_A_SHARE = 4
"""Where many shares wait, that many admissions for each of them: taking turns alone takes one."""

MAX_COST_RATIO = 16
"""The most by which a share of dear requests has to wait longer than one whose requests cost as much as others'."""

ROUNDS_A_LOOK = 8
"""Admissions between two looks at who has waited too long."""

MAX_PASSED = 256
"""Ready sequences of its share that a cold one is charged for at most: those in front of it, where they are more."""

MAX_IDLE_SHARES = 65536

_turn_of = itemgetter(0)


class FairQueue:
    """Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", 2024), with weights.

    The next sequence is the best of the share that was served least, input and output priced; of shares that were
    served alike, of the one that runs least. A share that becomes active, or has something waiting again, is lifted to
    the least served of those, or to the last that was: nobody saves up by being idle. Priorities go before counters,
    and within a share without bound.

    A share that has waited too long goes before everyone who has not. It has when both are true: there were
    K = max(MAX_ROUNDS, ROUNDS_A_SHARE * shares that wait) admissions of others, and these were charged ROUNDS_A_SHARE
    times what a fair order gives to all who wait until the share's next request, at its price, comes up. For dear
    requests that may take more than K admissions, but never more than MAX_COST_RATIO * K. Beyond its bound a share
    waits for at most ROUNDS_A_LOOK admissions and one each of the shares that wait as long, once its adapter is
    resident and its pages can be had.
    """

    def __init__(self) -> None:
        self._active: dict[str, Share] = {}
        # Longest idle first: their counters are kept, or being idle for a moment would reset them.
        self._idle: OrderedDict[str, Share] = OrderedDict()
        self._resident: set[str] = set()
        self._by_digest: defaultdict[str, dict[Sequence, None]] = defaultdict(dict)
        # Those that have something waiting, the longest wait first.
        self._waiting: OrderedDict[Share, None] = OrderedDict()
        self._waiting_weight = 0
        self._late: dict[Share, None] = {}
        self._looked_at = 0
        self._least_active = ShareHeap(_served)
        self._least_waiting = ShareHeap(_served)
        self._heads = {True: ShareHeap(_ready_turn), False: ShareHeap(_cold_turn)}
        # Shares whose place in `_heads` is to be looked at again: because what waits changed, or only their counters.
        self._changed: dict[Share, None] = {}
        self._charged_more: dict[Share, None] = {}
        self._last_asked = (0, 0)
        self._last_order: list[Sequence] = []
        self._num_admissions = 0
        self._charged = 0.0
        # What the last active share had been served when it left.
        self._last_served = 0.0
        self.num_waiting = 0
        self.num_ready = 0
        self.num_cold = 0
        self.num_waiting_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Let a new or preempted sequence wait."""
        share = self._activated(sequence)
        if not share.is_waiting and not sequence.has_run:
            # Also where it runs something: one small request that never ends must not save up for the others.
            least = self._least_waiting.least()
            share.served = max(share.served, 0.0 if least is None else least.served)
        self._count_tokens(share, sequence, 1)
        self.num_waiting += 1
        if sequence.add.digest is not None:
            self._by_digest[sequence.add.digest][sequence] = None
        self._insert(share, sequence)

    def remove(self, sequence: Sequence) -> None:
        """The sequence waits no longer and will not run."""
        self._rest(self._take(sequence))

    def set_limit(self, sequence: Sequence, num_tokens: int) -> None:
        """Give a waiting sequence another limit; its place stays."""
        share = self._active[sequence.add.share_key]
        self._discard(share, sequence)
        self._count_tokens(share, sequence, -1)
        sequence.num_reserved = num_tokens
        self._count_tokens(share, sequence, 1)
        self._insert(share, sequence)

    def admit(self, sequence: Sequence, num_tokens: int) -> None:
        """The sequence begins to run; `num_tokens` of its input are charged."""
        share = self._take(sequence)
        share.num_running += 1
        share.num_admissions += not sequence.has_run
        self._charge(share, INPUT_PRICE * num_tokens)
        self._num_admissions += 1
        if share.is_waiting:
            self._begin_wait(share)

    def charge_outputs(self, sequences: list[Sequence]) -> None:
        """The sequences, which run or wait, chose one more token each."""
        for sequence in sequences:
            share = self._active[sequence.add.share_key]
            share.charged += OUTPUT_PRICE
            share.served += OUTPUT_PRICE / share.weight
            if share.ready or share.cold:
                self._charged_more[share] = None
        self._charged += OUTPUT_PRICE * len(sequences)

    def leave(self, sequence: Sequence) -> None:
        """A running sequence ended, or gave its place up and will wait again."""
        share = self._active[sequence.add.share_key]
        share.num_running -= 1
        if share.is_waiting:
            self._changed[share] = None
        self._rest(share)

    def served(self, sequence: Sequence) -> float:
        """What the share of a sequence that runs or waits has had."""
        return self._active[sequence.add.share_key].served

    def set_resident(self, digest: str, is_resident: bool) -> None:
        """An adapter came or went: sequences that want it are ready, or are not any more."""
        if is_resident == (digest in self._resident):
            return
        moved: defaultdict[Share, list[Sequence]] = defaultdict(list)
        for sequence in self._by_digest.get(digest, ()):
            share = self._active[sequence.add.share_key]
            if sequence not in share.parked:
                moved[share].append(sequence)
        if is_resident:
            self._resident.add(digest)
        else:
            self._resident.discard(digest)
        for share, sequences in moved.items():
            source, target = share.line(not is_resident), share.line(is_resident)
            source[:] = [one for one in source if one.add.digest != digest]
            target.extend(sequences)
            target.sort(key=place)
            self._count_line(is_resident, len(sequences))
            self._count_line(not is_resident, -len(sequences))
            self._changed[share] = None

    def order(self, num_ready: int, num_cold: int, is_exact: bool = True) -> list[Sequence]:
        """The first so many ready and cold sequences in the order of their turns, as if each were admitted in turn.

        Where more are ready than asked for, it ends with the last ready one: what comes behind is not known.

        Costs a logarithm of the number of shares for each sequence returned and each share that changed, and next to
        nothing where nothing changed. Where the order need not be exact, counters that rose since are no change.
        """
        self._look_for_late()
        is_same = self._last_asked == (num_ready, num_cold) and not self._changed
        if is_same and not (is_exact and self._charged_more):
            return self._last_order
        self._changed |= self._charged_more
        self._charged_more.clear()
        for share in self._changed:
            for is_ready, heap in self._heads.items():
                if share.line(is_ready):
                    heap.update(share)
                else:
                    heap.discard(share)
        self._changed.clear()
        ready = self._order(True, num_ready) if self.num_ready else []
        cold = self._order(False, num_cold) if self.num_cold else []
        if 0 < num_ready < self.num_ready:
            # An adapter that was loaded for one behind the last ready one would find its sequence ready, but not
            # listed, and give way to the next before it was used.
            last = ready[-1][0]
            cold = [item for item in cold if item[0] <= last]
        self._last_asked = num_ready, num_cold
        # Two orders become one, which sorting takes no longer for than going through them.
        self._last_order = [sequence for _, sequence in sorted(ready + cold, key=_turn_of)]
        return self._last_order

    def shed_candidate(self) -> Sequence | None:
        """Whom a full queue can best do without: of the share with most waiting for its weight, the newest that has
        never run."""
        waiting = [share for share in self._waiting if share.num_waiting_tokens]
        waiting.sort(key=lambda share: share.num_waiting_tokens / share.weight, reverse=True)
        for share in waiting:
            never_run = [one for one in (*share.ready, *share.cold) if not one.has_run]
            if never_run:
                return max(never_run, key=lambda one: (-one.add.priority, one.arrival))
        return None

    def sequences(self) -> list[Sequence]:
        """All that wait, in no particular order."""
        return [one for share in self._active.values() for one in (*share.ready, *share.cold, *share.parked)]

    def _order(self, is_ready: bool, count: int) -> list[tuple[Turn, Sequence]]:
        """The first `count` sequences of one kind, with their turns."""
        # Keys end with arrivals, which are all different: what follows them is never compared.
        heads: list[tuple[Turn, Sequence, Iterator[tuple[Turn, Sequence]]]] = []
        for share in self._late:
            if share.line(is_ready):
                turns = _turns(share, is_ready, self._num_admissions - share.waits_since)
                heads.append((*next(turns), turns))
        heapq.heapify(heads)
        others = self._heads[is_ready].ascending()
        following = next(others, None)
        order: list[tuple[Turn, Sequence]] = []
        while len(order) < count:
            # A share's turn in the heap is never later than its own first one here.
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
                # Nobody else comes between.
                order += islice(turns, count - len(order))
                break
            after = next(turns, None)
            if after is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (*after, turns))
        return order

    def _look_for_late(self) -> None:
        if self._num_admissions - self._looked_at < ROUNDS_A_LOOK:
            return
        self._looked_at = self._num_admissions
        bound = max(MAX_ROUNDS, ROUNDS_A_SHARE * len(self._waiting))
        for share in self._waiting:
            rounds = self._num_admissions - share.waits_since
            if rounds < bound:
                # Those behind it came later.
                break
            fair_wait = share.typical_price * self._waiting_weight / share.weight
            if rounds >= MAX_COST_RATIO * bound or self._charged - share.charged_before >= ROUNDS_A_SHARE * fair_wait:
                self._late[share] = None
                self._changed[share] = None

    def _charge(self, share: Share, price: float) -> None:
        share.charged += price
        self._charged += price
        share.served += price / share.weight
        if share.ready or share.cold:
            self._charged_more[share] = None

    def _insert(self, share: Share, sequence: Sequence) -> None:
        if sequence.is_chosen_out:
            share.parked[sequence] = None
            return
        if not share.is_waiting:
            self._begin_wait(share)
            self._waiting_weight += share.weight
            self._least_waiting.update(share)
        is_ready = self._is_ready(sequence)
        insort(share.line(is_ready), sequence, key=place)
        self._count_line(is_ready, 1)
        self._changed[share] = None

    def _discard(self, share: Share, sequence: Sequence) -> None:
        if sequence in share.parked:
            del share.parked[sequence]
            return
        is_ready = self._is_ready(sequence)
        line = share.line(is_ready)
        index = bisect_left(line, place(sequence), key=place)
        assert line[index] is sequence
        del line[index]
        self._count_line(is_ready, -1)
        self._changed[share] = None
        if not share.is_waiting:
            del self._waiting[share]
            self._late.pop(share, None)
            self._waiting_weight -= share.weight
            self._least_waiting.discard(share)

    def _count_line(self, is_ready: bool, change: int) -> None:
        if is_ready:
            self.num_ready += change
        else:
            self.num_cold += change

    def _begin_wait(self, share: Share) -> None:
        share.waits_since = self._num_admissions
        share.charged_before = self._charged
        self._waiting[share] = None
        self._waiting.move_to_end(share)
        self._late.pop(share, None)

    def _is_ready(self, sequence: Sequence) -> bool:
        return sequence.add.digest is None or sequence.add.digest in self._resident

    def _take(self, sequence: Sequence) -> Share:
        share = self._active[sequence.add.share_key]
        self._discard(share, sequence)
        self._count_tokens(share, sequence, -1)
        self.num_waiting -= 1
        if sequence.add.digest is not None:
            del self._by_digest[sequence.add.digest][sequence]
            if not self._by_digest[sequence.add.digest]:
                del self._by_digest[sequence.add.digest]
        return share

    def _count_tokens(self, share: Share, sequence: Sequence, sign: int) -> None:
        # What was accepted once is not in the way of others: it is only to be computed again.
        if not sequence.has_run:
            share.num_waiting_tokens += sign * sequence.num_reserved
            self.num_waiting_tokens += sign * sequence.num_reserved

    def _activated(self, sequence: Sequence) -> Share:
        key = sequence.add.share_key
        share = self._active.get(key)
        if share is None:
            share = self._idle.pop(key, None) or Share(key)
            least = self._least_active.least()
            share.served = max(share.served, self._last_served if least is None else least.served)
            self._active[key] = share
            self._least_active.update(share)
        weight = max(1, sequence.add.weight)
        if share.is_waiting:
            self._waiting_weight += weight - share.weight
        share.weight = weight
        return share

    def _rest(self, share: Share) -> None:
        if not share.is_idle:
            return
        self._least_active.discard(share)
        self._idle[share.key] = self._active.pop(share.key)
        self._last_served = share.served
        if len(self._idle) > MAX_IDLE_SHARES:
            self._idle.popitem(last=False)


def _served(share: Share) -> Turn:
    return (share.served,)


def _ready_turn(share: Share) -> Turn:
    return _turn(share.ready[0], share.served, share.num_running)


def _cold_turn(share: Share) -> Turn:
    return _turn(share.cold[0], share.served, share.num_running)


def _turn(sequence: Sequence, served: float, num_running: int) -> Turn:
    # A share that was just lifted was served as much as another, which may run much.
    return 1, -sequence.add.priority, served, num_running, sequence.arrival


def _turns(share: Share, is_ready: bool, rounds: int) -> Iterator[tuple[Turn, Sequence]]:
    """One share's ready or cold sequences with their turns, each charged for those before it as if they were admitted.

    Cold ones are charged what goes before them, ready ones only for ready ones: those that wait for an adapter hold up
    nobody who does not. `rounds` is how long the share has waited, if that is too long, else 0.
    """
    served, num_running, weight = share.served, share.num_running, share.weight
    passed = iter(()) if is_ready else islice(share.ready, MAX_PASSED)
    before = next(passed, None)
    for sequence in share.line(is_ready):
        own_place = place(sequence)
        while before is not None and place(before) < own_place:
            served += INPUT_PRICE * before.num_tokens / weight
            num_running += 1
            # Once it is served, its share has waited for nothing.
            rounds = 0
            before = next(passed, None)
        if rounds:
            yield (0, -rounds, 0, 0, sequence.arrival), sequence
        else:
            yield _turn(sequence, served, num_running), sequence
        served += INPUT_PRICE * sequence.num_tokens / weight
        num_running += 1
        rounds = 0
