"""Whose turn it is: waiting sequences in a weighted fair order over shares."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field

from loramux.engine.messages import Add
from loramux.engine.sequence import Sequence

INPUT_PRICE = 1.0
OUTPUT_PRICE = 2.0
"""A new token costs a row of its own in a step; a prompt's tokens share their weights' reading."""

MAX_ROUNDS = 64
"""Admissions of others after which a share that waits goes first, whatever it was served before."""

ROUNDS_A_SHARE = 4
"""Where many shares wait, that many admissions for each of them: taking turns alone takes one."""

MAX_IDLE_SHARES = 65536


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
    num_waiting_tokens: int = 0
    num_running: int = 0
    waits_since: int = 0
    """The number of admissions there had been when its wait began: when it came, or was last served."""


class FairQueue:
    """Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", 2024), with weights.

    The next sequence is the best of the share that was served least, input and output priced. A share that becomes
    active, or has something waiting again, is lifted to the least served of those, or to the last that was: nobody
    saves up by being idle. Priorities go before counters, and within a share without bound. A share that has waited for
    K admissions of others goes before everyone who has not, K being MAX_ROUNDS or, if that is more, ROUNDS_A_SHARE
    times the shares that wait. So no share waits for more than K admissions and one each of the shares that wait as
    long, once its adapter is resident and its pages can be had.
    """

    def __init__(self) -> None:
        self._active: dict[str, Share] = {}
        # Longest idle first: their counters are kept, or being idle for a moment would reset them.
        self._idle: OrderedDict[str, Share] = OrderedDict()
        self._resident: set[str] = set()
        self._by_digest: defaultdict[str, dict[Sequence, None]] = defaultdict(dict)
        self._num_admissions = 0
        # What the last active share had been served when it left.
        self._last_served = 0.0
        self.num_waiting = 0
        self.num_cold = 0
        self.num_waiting_tokens = 0

    def add(self, sequence: Sequence) -> None:
        """Let a new or preempted sequence wait."""
        share = self._activated(sequence)
        if not share.ready and not share.cold:
            share.waits_since = self._num_admissions
            if not sequence.has_run:
                # Also where it runs something: one small request that never ends must not save up for the others.
                least = min((one.served for one in self._active.values() if one.ready or one.cold), default=0.0)
                share.served = max(share.served, least)
        self._count_tokens(share, sequence, 1)
        self.num_waiting += 1
        self._insert(share, sequence)
        if sequence.add.digest is not None:
            self._by_digest[sequence.add.digest][sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """The sequence waits no longer and will not run."""
        self._rest(self._take(sequence))

    def change(self, sequence: Sequence, add: Add) -> None:
        """Give a waiting sequence another limit; its place stays."""
        share = self._active[sequence.add.share_key]
        self._count_tokens(share, sequence, -1)
        sequence.add = add
        self._count_tokens(share, sequence, 1)

    def admit(self, sequence: Sequence, num_tokens: int) -> None:
        """The sequence begins to run; `num_tokens` of its input are charged."""
        share = self._take(sequence)
        share.num_running += 1
        share.served += INPUT_PRICE * num_tokens / share.weight
        self._num_admissions += 1
        share.waits_since = self._num_admissions

    def charge_output(self, sequence: Sequence) -> None:
        """The sequence, which runs or waits, chose one more token."""
        share = self._active[sequence.add.share_key]
        share.served += OUTPUT_PRICE / share.weight

    def leave(self, sequence: Sequence) -> None:
        """A running sequence ended, or gave its place up and will wait again."""
        share = self._active[sequence.add.share_key]
        share.num_running -= 1
        self._rest(share)

    def served(self, sequence: Sequence) -> float:
        """What the share of a sequence that runs or waits has had."""
        return self._active[sequence.add.share_key].served

    def set_resident(self, digest: str, is_resident: bool) -> None:
        """An adapter came or went: sequences that want it are ready, or are not any more."""
        waiting = self._by_digest.get(digest, {})
        for sequence in waiting:
            self._discard(self._active[sequence.add.share_key], sequence)
        if is_resident:
            self._resident.add(digest)
        else:
            self._resident.discard(digest)
        for sequence in waiting:
            self._insert(self._active[sequence.add.share_key], sequence)

    def order(self, num_ready: int, num_cold: int) -> list[Sequence]:
        """The first so many ready and cold sequences in the order of their turns, as if each were admitted in turn."""
        left = {True: num_ready, False: num_cold}
        # Keys end with arrivals, which are all different: what follows them is never compared.
        heads: list[tuple[tuple[float, ...], _Cursor]] = []
        waiting = [share for share in self._active.values() if share.ready or share.cold]
        max_rounds = max(MAX_ROUNDS, ROUNDS_A_SHARE * len(waiting))
        for share in waiting:
            rounds = self._num_admissions - share.waits_since
            cursor = _Cursor(share, rounds if rounds >= max_rounds else 0)
            if cursor.advance(left):
                heads.append((cursor.turn, cursor))
        heapq.heapify(heads)
        order: list[Sequence] = []
        while heads:
            _, cursor = heads[0]
            if left[cursor.is_ready]:
                order.append(cursor.take())
                left[cursor.is_ready] -= 1
            if cursor.advance(left):
                heapq.heapreplace(heads, (cursor.turn, cursor))
            else:
                heapq.heappop(heads)
        return order

    def most_dispensable(self) -> Sequence | None:
        """Whom a full queue can best do without: of the share with most waiting for its weight, the newest that has
        never run."""
        waiting = [share for share in self._active.values() if share.num_waiting_tokens]
        waiting.sort(key=lambda share: share.num_waiting_tokens / share.weight, reverse=True)
        for share in waiting:
            never_run = [one for one in (*share.ready, *share.cold) if not one.has_run]
            if never_run:
                return max(never_run, key=lambda one: (-one.add.priority, one.arrival))
        return None

    def sequences(self) -> list[Sequence]:
        """All that wait, in no particular order."""
        return [one for share in self._active.values() for one in (*share.ready, *share.cold)]

    def _is_ready(self, sequence: Sequence) -> bool:
        return sequence.add.digest is None or sequence.add.digest in self._resident

    def _insert(self, share: Share, sequence: Sequence) -> None:
        if self._is_ready(sequence):
            insort(share.ready, sequence, key=_place)
        else:
            insort(share.cold, sequence, key=_place)
            self.num_cold += 1

    def _discard(self, share: Share, sequence: Sequence) -> None:
        waiting = share.ready if self._is_ready(sequence) else share.cold
        index = bisect_left(waiting, _place(sequence), key=_place)
        assert waiting[index] is sequence
        del waiting[index]
        self.num_cold -= waiting is share.cold

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
            least = min((one.served for one in self._active.values()), default=self._last_served)
            share.served = max(share.served, least)
            self._active[key] = share
        share.weight = max(1, sequence.add.weight)
        return share

    def _rest(self, share: Share) -> None:
        if share.ready or share.cold or share.num_running:
            return
        self._idle[share.key] = self._active.pop(share.key)
        self._last_served = share.served
        if len(self._idle) > MAX_IDLE_SHARES:
            self._idle.popitem(last=False)


def _place(sequence: Sequence) -> tuple[int, int]:
    return -sequence.add.priority, sequence.arrival


class _Cursor:
    """Goes through one share's waiting sequences in order, charging for each as if it had been admitted.

    Cold ones are no charge to ready ones: those that wait for an adapter hold up nobody who does not. `rounds` is how
    long the share has waited, if that is too long, else 0.
    """

    def __init__(self, share: Share, rounds: int) -> None:
        self._share = share
        self._served = {True: share.served, False: share.served}
        self._rounds = {True: rounds, False: rounds}
        self._index = {True: 0, False: 0}
        self.is_ready = True

    def advance(self, left: dict[bool, int]) -> bool:
        """Find the next sequence among the kinds of which some are left to be taken; False at the end."""
        ready = self._next(True) if left[True] else None
        cold = self._next(False) if left[False] else None
        if ready is None and cold is None:
            return False
        self.is_ready = cold is None or (ready is not None and _place(ready) < _place(cold))
        return True

    @property
    def turn(self) -> tuple[float, ...]:
        head = self._head()
        if self._rounds[self.is_ready]:
            return (0, -self._rounds[self.is_ready], 0, head.arrival)
        return (1, -head.add.priority, self._served[self.is_ready], head.arrival)

    def take(self) -> Sequence:
        head = self._head()
        self._index[self.is_ready] += 1
        charge = INPUT_PRICE * head.num_tokens / self._share.weight
        self._served[False] += charge
        if self.is_ready:
            self._served[True] += charge
        # Once it is served, its share has waited for nothing.
        self._rounds[self.is_ready] = 0
        return head

    def _next(self, is_ready: bool) -> Sequence | None:
        """The next sequence of one kind that could run: one that paused waits for something else."""
        waiting = self._share.ready if is_ready else self._share.cold
        while self._index[is_ready] < len(waiting) and waiting[self._index[is_ready]].is_chosen_out:
            self._index[is_ready] += 1
        return waiting[self._index[is_ready]] if self._index[is_ready] < len(waiting) else None

    def _head(self) -> Sequence:
        return (self._share.ready if self.is_ready else self._share.cold)[self._index[self.is_ready]]
