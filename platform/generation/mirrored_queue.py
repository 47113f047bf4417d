"""Follows the engine's fair order with what a gateway knows of its own requests."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from loramux.engine.protocol.service_tiers import (
    BACKGROUND_RANK,
    FIRST_TIER_LEAD,
    INPUT_PRICE,
    OUTPUT_PRICE,
    SERVICE_TIERS,
    TIER_FACTORS,
    makes_room,
    rank_of,
)

NUM_ANSWERS = 64
"""Number of requests over which the length of answers is averaged."""

MAX_IDLE_SHARES = 10_000
"""Maximum number of idle shares whose counters are kept."""

_RANKS = range(BACKGROUND_RANK)
_LEADS = [FIRST_TIER_LEAD if rank == 0 else 0.0 for rank in _RANKS]
_YIELDING = [frozenset(other for other in _RANKS if makes_room(other, rank)) for rank in _RANKS]
"""For each rank, the ranks whose waiting requests it never waits for."""
_YIELDED_TO = [frozenset(other for other in _RANKS if makes_room(rank, other)) for rank in _RANKS]
"""For each rank, the ranks whose waiting requests all begin before its own."""


@dataclass(frozen=True, slots=True)
class Share:
    """A share of the engine as `FairQueue` knows it: a tenant's requests of one service tier.

    `weight` is the tenant's weight, without the factor of the tier.
    """

    tenant_id: str
    service_tier: str
    weight: int = 1

    @property
    def rank(self) -> int:
        return rank_of(self.service_tier, is_background=False)

    @property
    def part(self) -> float:
        return max(1, self.weight) * TIER_FACTORS[self.service_tier]


@dataclass(slots=True)
class Amount:
    """What requests need: prompt tokens to compute, and sequence slots."""

    prompt_tokens: float = 0.0
    sequences: float = 0.0

    def add(self, other: Amount, times: float = 1) -> None:
        self.prompt_tokens += times * other.prompt_tokens
        self.sequences += times * other.sequences

    def per(self, seconds: float) -> Amount:
        return Amount(self.prompt_tokens / seconds, self.sequences / seconds)


@dataclass(slots=True, eq=False)
class _Asking:
    """The requests of one share. `share`, `rank` and `part` never change."""

    share: Share
    rank: int
    part: float
    served: float = 0.0
    """The share's counter: see `FairShare.served`. An answer is charged when it begins, by the usual length of answers,
    and corrected when it ends.
    """
    waiting: Amount = field(default_factory=Amount)
    num_running: float = 0.0
    arrived: Amount = field(default_factory=Amount)
    """Requests that have arrived since arrivals were last counted."""
    arrivals: Amount = field(default_factory=Amount)
    """Requests that arrived per second before that."""

    @property
    def is_idle(self) -> bool:
        return not (self.waiting.sequences or self.num_running or self.arrivals.sequences)


@dataclass(slots=True)
class _Request:
    asking: _Asking
    needs: Amount
    has_begun: bool = False
    answer_tokens: float = 0.0
    """Output tokens that the share was charged for when the request began."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What begins before a request.

    `growing` has the shares that can begin more than what waits now, each with the price of all that it can begin.
    `arrivals` are the requests of further shares that will arrive per second. `answer_price` is the usual price of an
    answer.
    """

    now: Amount
    arrivals: Amount
    growing: list[tuple[_Asking, float]]
    answer_price: float

    @property
    def grows(self) -> bool:
        """True if what begins before the request depends on how long it waits."""
        return bool(self.growing or self.arrivals.sequences)

    def within(self, seconds: float) -> Amount:
        """What begins before the request if it waits for so long, and requests go on arriving meanwhile."""
        tokens = self.now.prompt_tokens + seconds * self.arrivals.prompt_tokens
        sequences = self.now.sequences + seconds * self.arrivals.sequences
        answer_price = self.answer_price
        for asking, most in self.growing:
            # Calling methods here would double the time that a forecast takes.
            waiting, arrivals = asking.waiting, asking.arrivals
            asked_tokens = waiting.prompt_tokens + seconds * arrivals.prompt_tokens
            asked = waiting.sequences + seconds * arrivals.sequences
            price = INPUT_PRICE * asked_tokens + answer_price * asked
            part = most / price if price > most else 1.0
            tokens += part * asked_tokens
            sequences += part * asked
        return Amount(tokens, sequences)


class MirroredQueue:
    """The shares with requests of this gateway, with counters like those of `FairQueue`. The engine's own counters also
    depend on other gateways and on cached prompts, but the order of this gateway's shares is nearly the same.
    """

    def __init__(self) -> None:
        self._requests: dict[str, _Request] = {}
        self._shares: dict[Share, _Asking] = {}
        # The shares with requests now or in the last seconds, and those of them whose requests wait. Only the counters
        # of the others matter.
        self._active: dict[_Asking, None] = {}
        self._waiting: dict[_Asking, None] = {}
        self.running = [0.0] * BACKGROUND_RANK
        """Number of running sequences of each rank."""
        # As in `FairQueue`.
        self._floor = 0.0
        # Counter of the last share that had no more requests.
        self._last_served = 0.0
        # Like `arrived` and `arrivals`: requests of shares that had no others and whose counter was raised.
        self._new_arrived, self._new_arrivals = Amount(), Amount()
        # Mean number of output tokens per sequence.
        self._answer_tokens = 0.0
        self._num_answers = 0

    @property
    def num_shares(self) -> int:
        """Number of shares with requests now or in the last seconds, or with a counter that would count."""
        return len(self._shares)

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def add(self, request_id: str, share: Share, prompt_tokens: int, num_sequences: int) -> None:
        """Note that a request is on its way to the engine."""
        asking = self._shares.get(share)
        if asking is None:
            asking = self._shares[share] = _Asking(share, share.rank, share.part)
        needs = Amount(prompt_tokens, num_sequences)
        if asking not in self._waiting:
            least = self._floor = self._least_served()
            if asking.served <= least and asking not in self._active:
                self._new_arrived.add(needs)
            asking.served = max(asking.served, least)
            self._waiting[asking] = self._active[asking] = None
        self._requests[request_id] = _Request(asking, needs)
        asking.waiting.add(needs)
        asking.arrived.add(needs)

    def begin(self, request_id: str) -> None:
        """Note that a request has got its first token. Has no effect on unknown requests."""
        request = self._requests.get(request_id)
        if request is None or request.has_begun:
            return
        asking, needs = request.asking, request.needs
        request.has_begun, request.answer_tokens = True, self._answer_tokens * needs.sequences
        self._end_wait(request)
        asking.num_running += needs.sequences
        self.running[asking.rank] += needs.sequences
        asking.served += self._price(needs) / asking.part

    def remove(self, request_id: str, num_tokens: int = 0) -> None:
        """Note that a request has ended with this number of output tokens, or was refused. Has no effect on unknown
        requests.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        asking, num_sequences = request.asking, request.needs.sequences
        if request.has_begun:
            asking.num_running -= num_sequences
            self.running[asking.rank] -= num_sequences
            asking.served += OUTPUT_PRICE * (num_tokens - request.answer_tokens) / asking.part
            self._num_answers = min(self._num_answers + 1, NUM_ANSWERS)
            self._answer_tokens += (num_tokens / num_sequences - self._answer_tokens) / self._num_answers
        else:
            self._end_wait(request)
        if not asking.num_running and not asking.waiting.sequences:
            self._last_served = asking.served

    def count_arrivals(self, seconds: float) -> None:
        """Count the requests that have arrived since the last call, which was this many seconds ago."""
        self._new_arrivals, self._new_arrived = self._new_arrived.per(seconds), Amount()
        for asking in list(self._active):
            asking.arrivals, asking.arrived = asking.arrived.per(seconds), Amount()
            if asking.is_idle:
                del self._active[asking]
        # A counter that would be raised says nothing.
        least = self._least_served()
        idle = [asking for asking in self._shares.values() if asking not in self._active]
        for asking in idle:
            if asking.served <= least or len(idle) > MAX_IDLE_SHARES:
                del self._shares[asking.share]

    def waiting_at(self, rank: int) -> Amount:
        """What waits at a rank."""
        found = Amount()
        for asking in self._waiting:
            if asking.rank == rank:
                found.add(asking.waiting)
        return found

    def waiting_of(self, share: Share) -> Amount:
        """What waits in a share."""
        asking = self._shares.get(share)
        return Amount() if asking is None else Amount(asking.waiting.prompt_tokens, asking.waiting.sequences)

    def of_tenant(self, share: Share) -> tuple[Amount, float]:
        """What a share's tenant waits for in the share's tier and better ones, and how many slots it holds."""
        waiting, num_held = Amount(), 0.0
        for rank, tier in enumerate(SERVICE_TIERS):
            asking = self._shares.get(Share(share.tenant_id, tier, share.weight))
            if asking is not None:
                num_held += 0.0 if makes_room(rank, share.rank) else asking.num_running
                if rank <= share.rank:
                    waiting.add(asking.waiting)
        return waiting, num_held

    def ahead_of(self, share: Share) -> Ahead:
        """Return what begins before a new request of a share: what already waits in the share, and what other shares
        can begin until their counters reach the one that the share then has. Most of a forecast's time is spent here.
        """
        rank, asking, least = share.rank, self._shares.get(share), self._least_served()
        now, served, num_running = self.waiting_of(share), least, 0.0
        if asking is not None:
            served, num_running = max(asking.served, least), asking.num_running
        answer_price = OUTPUT_PRICE * self._answer_tokens
        turn = served + self._price(now) / share.part - _LEADS[rank]
        never, always = _YIELDING[rank], _YIELDED_TO[rank]
        growing: list[tuple[_Asking, float]] = []
        for other in self._active:
            waiting, other_rank = other.waiting, other.rank
            if other_rank in never or other is asking:
                continue
            price, most = INPUT_PRICE * waiting.prompt_tokens + answer_price * waiting.sequences, math.inf
            if other_rank not in always:
                lead = turn + _LEADS[other_rank] - (other.served if other.served > least else least)
                if lead < 0 or (lead == 0 and other.num_running > num_running):
                    continue
                # The request with which the counter reaches the turn begins, too.
                most = lead * other.part + (price / waiting.sequences if price else 0.0)
            if most > price and other.arrivals.sequences:
                growing.append((other, most))
            elif price:
                now.add(waiting, most / price if price > most else 1.0)
        # The counter of a share without requests is raised to the lowest one. It is then behind shares that wait there.
        arrivals = self._new_arrivals if turn > least else Amount()
        return Ahead(now, arrivals, growing, answer_price)

    def _least_served(self) -> float:
        """The counter to which that of a share is raised when it begins to wait, so that it saves up no credit."""
        if self._waiting:
            return max(self._floor, min([one.served for one in self._waiting]))
        running = min((one.served for one in self._active if one.num_running), default=self._last_served)
        return max(self._floor, running)

    def _price(self, amount: Amount) -> float:
        return INPUT_PRICE * amount.prompt_tokens + OUTPUT_PRICE * self._answer_tokens * amount.sequences

    def _end_wait(self, request: _Request) -> None:
        asking = request.asking
        asking.waiting.add(request.needs, -1)
        if not asking.waiting.sequences:
            del self._waiting[asking]
