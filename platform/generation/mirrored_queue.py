"""Follows the engine's fair order with what a gateway knows of its own requests."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

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
"""Number of requests over which the length of answers, and the time that they take, are averaged."""

NUM_PROMPTS = 8
"""Number of requests of a share over which the cached part of its prompts is averaged."""

MAX_IDLE_SHARES = 10_000
"""Maximum number of idle shares whose counters are kept."""

_RANKS = range(BACKGROUND_RANK)
_YIELDING = [[other for other in _RANKS if makes_room(other, rank)] for rank in _RANKS]
"""For each rank, the ranks whose waiting requests it never waits for."""
_YIELDED_TO = [[other for other in _RANKS if makes_room(rank, other)] for rank in _RANKS]
"""For each rank, the ranks whose waiting requests all begin before its own."""

_Array = NDArray[np.float64]
# Rows of `MirroredQueue._columns`. `_Standing.asked` relies on the order of four of them.
_SERVED, _PART, _LEAD, _RANK, _RUNNING, _TOKENS, _SEQUENCES, _TOKENS_PER_S, _SEQUENCES_PER_S, _PROMPT_PRICE = range(10)
_NUM_FIGURES = 10
_LEAST_PRICE = 1e-9
"""Less than the price of any request. Prevents divisions by 0."""


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

    @property
    def lead(self) -> float:
        return FIRST_TIER_LEAD / self.part if self.rank == 0 else 0.0


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
    """The requests of one share. `share`, `rank`, `part` and `lead` never change."""

    share: Share
    rank: int
    part: float
    lead: float
    index: int | None = None
    """Place in `MirroredQueue._active`, or None if it is not there."""
    served: float = 0.0
    """The share's counter: see `FairShare.served`. A request is charged when it begins, by the usual length of answers
    and the usual price of the share's prompts. The charge is corrected when it ends.
    """
    prompt_price: float = INPUT_PRICE
    """Usual price of a prompt token. The engine charges nothing for cached tokens."""
    waiting: Amount = field(default_factory=Amount)
    num_running: float = 0.0
    arrived: Amount = field(default_factory=Amount)
    """Requests that have arrived since arrivals were last counted."""
    arrivals: Amount = field(default_factory=Amount)
    """Requests that arrived per second before that."""

    @property
    def is_idle(self) -> bool:
        return not (self.waiting.sequences or self.num_running or self.arrivals.sequences)

    def values(self) -> tuple[float, ...]:
        """The share's column of `MirroredQueue._columns`."""
        waiting, arrivals = self.waiting, self.arrivals
        amounts = (waiting.prompt_tokens, waiting.sequences, arrivals.prompt_tokens, arrivals.sequences)
        return self.served, self.part, self.lead, self.rank, self.num_running, *amounts, self.prompt_price


@dataclass(slots=True)
class _Request:
    asking: _Asking
    needs: Amount
    is_pooled: bool
    begun_s: float | None = None
    """When its first token came, or None before that."""
    charged: float = 0.0
    """The price that the share was charged when the request began."""


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """What begins before a request.

    `now` has what begins however long the request waits. `arrivals` are the requests of further shares that will arrive
    per second. The arrays are about all shares. `asked` has their prompt tokens and sequences: those that wait, then
    those that arrive per second. `price` and `price_per_s` have the prices of the same. `most` has the price of all
    that a share can begin. It is 0 if the share can begin no more than what waits now, because that is part of `now`.
    """

    now: Amount
    arrivals: Amount
    asked: _Array  # [4, num_active]
    price: _Array  # [num_active]
    price_per_s: _Array  # [num_active]
    most: _Array  # [num_active]

    @property
    def grows(self) -> bool:
        """True if what begins before the request depends on how long it waits."""
        return bool(self.most.any() or self.arrivals.sequences)

    def within(self, seconds: float) -> Amount:
        """What begins before the request if it waits for so long, and requests go on arriving meanwhile."""
        found = Amount(self.now.prompt_tokens, self.now.sequences)
        found.add(self.arrivals, seconds)
        tokens, sequences, tokens_per_s, sequences_per_s = (
            self.asked @ _part(self.most, self.price + seconds * self.price_per_s)
        ).tolist()
        found.add(Amount(tokens + seconds * tokens_per_s, sequences + seconds * sequences_per_s))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Standing:
    """What all forecasts between two changes of the queue have in common."""

    least: float
    """See `MirroredQueue._least_served`."""
    counters: _Array  # [num_active]
    """The counters, raised to the lowest one and without the leads."""
    is_of_rank: list[NDArray[np.bool_]]  # [num_ranks][num_active]
    asked: _Array  # [4, num_active]
    """See `Ahead`, also for the prices."""
    price: _Array  # [num_active]
    price_per_s: _Array  # [num_active]
    next_price: _Array  # [num_active]
    """The mean price of a waiting request."""
    is_asking: NDArray[np.bool_]  # [num_active]
    """Whether more requests of the share arrive."""


class MirroredQueue:
    """The shares with requests of this gateway, with counters like those of `FairQueue`. The engine's own counters also
    depend on other gateways, but the order of this gateway's shares is nearly the same.

    What a forecast needs of each share is also kept in an array, because thousands of shares can have requests.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        # Those that have begun, in this order.
        self._begun: dict[str, _Request] = {}
        self._shares: dict[Share, _Asking] = {}
        # The shares with requests now or in the last seconds. Only the counters of the others matter.
        self._active: list[_Asking] = []
        # The same shares as columns: see `_Asking.values`. There is room for more of them.
        self._columns: _Array = np.zeros((_NUM_FIGURES, 64))
        # None after each change. Under overload, most requests are refused, and change nothing.
        self._standing: _Standing | None = None
        self.running = [0.0] * BACKGROUND_RANK
        """Number of running sequences of each rank."""
        self.waiting = [Amount() for _ in _RANKS]
        """What waits at each rank."""
        # Number of waiting sequences that will have a first token.
        self._num_awaited = 0.0
        # As in `FairQueue`.
        self._floor = 0.0
        # Counter of the last share that had no more requests.
        self._last_served = 0.0
        # Like `arrived` and `arrivals`: requests of shares that had no others and whose counter was raised.
        self._new_arrived, self._new_arrivals = Amount(), Amount()
        # Mean number of output tokens per sequence.
        self._answer_tokens = 0.0
        self.run_s = 0.0
        """Mean time from a request's first token to its end, in seconds. 0 before one has ended."""
        self._num_answers = 0

    @property
    def num_shares(self) -> int:
        """Number of shares with requests now or in the last seconds, or with a counter that would count."""
        return len(self._shares)

    @property
    def has_waiting(self) -> bool:
        """True if a request waits for its first token. A pooled request, which has none, waits until its end."""
        return bool(self._num_awaited)

    def add(
        self, request_id: str, share: Share, prompt_tokens: int, num_sequences: int, is_pooled: bool = False
    ) -> None:
        """Note that a request is on its way to the engine."""
        asking = self._shares.get(share)
        if asking is None:
            asking = self._shares[share] = _Asking(share, share.rank, share.part, share.lead)
        needs = Amount(prompt_tokens, num_sequences)
        if not asking.waiting.sequences:
            least = self._floor = self._least_served()
            if asking.index is None:
                if asking.served <= least:
                    self._new_arrived.add(needs)
                asking.index = len(self._active)
                self._active.append(asking)
                if asking.index == self._columns.shape[1]:
                    self._columns = np.pad(self._columns, ((0, 0), (0, asking.index)))
            asking.served = max(asking.served, least)
        request = self._requests[request_id] = _Request(asking, needs, is_pooled)
        self._count_waiting(request, 1)
        asking.arrived.add(needs)
        self._store(asking)

    def begin(self, request_id: str) -> None:
        """Note that a request has got its first token. Has no effect on unknown requests."""
        request = self._requests.get(request_id)
        if request is None or request.begun_s is not None:
            return
        asking, needs = request.asking, request.needs
        request.begun_s, request.charged = self._clock(), self._price(needs, asking.prompt_price)
        self._begun[request_id] = request
        self._count_waiting(request, -1)
        asking.num_running += needs.sequences
        self.running[asking.rank] += needs.sequences
        asking.served += request.charged / asking.part
        self._store(asking)

    def remove(self, request_id: str, num_tokens: int = 0, cached_tokens: int = 0) -> None:
        """Note that a request has ended with these numbers of output tokens and of cached prompt tokens, or that it was
        refused. Has no effect on unknown requests.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        asking, prompt_tokens, num_sequences = request.asking, request.needs.prompt_tokens, request.needs.sequences
        if request.begun_s is not None:
            del self._begun[request_id]
            asking.num_running -= num_sequences
            self.running[asking.rank] -= num_sequences
            prompt_price = INPUT_PRICE * (prompt_tokens - cached_tokens)
            asking.served += (prompt_price + OUTPUT_PRICE * num_tokens - request.charged) / asking.part
            if prompt_tokens:
                asking.prompt_price += (prompt_price / prompt_tokens - asking.prompt_price) / NUM_PROMPTS
            self._num_answers = min(self._num_answers + 1, NUM_ANSWERS)
            self._answer_tokens += (num_tokens / num_sequences - self._answer_tokens) / self._num_answers
            self.run_s += (self._clock() - request.begun_s - self.run_s) / self._num_answers
        else:
            self._count_waiting(request, -1)
        self._store(asking)
        if not asking.num_running and not asking.waiting.sequences:
            self._last_served = asking.served

    def count_arrivals(self, seconds: float) -> None:
        """Count the requests that have arrived since the last call, which was this many seconds ago."""
        self._standing = None
        self._new_arrivals, self._new_arrived = self._new_arrived.per(seconds), Amount()
        active, self._active = self._active, []
        for asking in active:
            asking.arrivals, asking.arrived = asking.arrived.per(seconds), Amount()
            asking.index = None if asking.is_idle else len(self._active)
            if asking.index is not None:
                self._active.append(asking)
        if self._active:
            self._columns[:, : len(self._active)] = np.array([asking.values() for asking in self._active]).T
        # A counter that would be raised says nothing.
        least = self._least_served()
        idle = [asking for asking in self._shares.values() if asking.index is None]
        for asking in idle:
            if asking.served <= least or len(idle) > MAX_IDLE_SHARES:
                del self._shares[asking.share]

    def begun_s(self, count: int, ranks: Collection[int], tenant_id: str | None = None) -> float | None:
        """When the first `count` of the running sequences of these ranks, and of the tenant if there is one, had begun,
        or None if fewer are running.
        """
        if count > sum([self.running[rank] for rank in ranks]):
            return None
        for request in self._begun.values():
            asking = request.asking
            if asking.rank in ranks and tenant_id in (None, asking.share.tenant_id):
                count -= int(request.needs.sequences)
                if count <= 0:
                    return request.begun_s
        return None

    def waiting_of(self, share: Share) -> Amount:
        """What waits in a share."""
        asking = self._shares.get(share)
        return Amount() if asking is None else Amount(asking.waiting.prompt_tokens, asking.waiting.sequences)

    def of_tenant(self, share: Share) -> tuple[Amount, float]:
        """What a share's tenant waits for in the share's tier and better ones, and how many slots it holds."""
        waiting, num_held, own_rank = Amount(), 0.0, share.rank
        for rank, tier in enumerate(SERVICE_TIERS):
            asking = self._shares.get(Share(share.tenant_id, tier, share.weight))
            if asking is not None:
                num_held += 0.0 if makes_room(rank, own_rank) else asking.num_running
                if rank <= own_rank:
                    waiting.add(asking.waiting)
        return waiting, num_held

    def ahead_of(self, share: Share) -> Ahead:
        """Return what begins before a new request of a share: what already waits in the share, and what other shares
        can begin until their counters reach the one that the share then has.
        """
        if self._standing is None:
            self._standing = self._stand()
        standing = self._standing
        rank, part, asking, least = share.rank, share.part, self._shares.get(share), standing.least
        now, served, num_running, prompt_price = self.waiting_of(share), least, 0.0, INPUT_PRICE
        if asking is not None:
            served, num_running, prompt_price = max(asking.served, least), asking.num_running, asking.prompt_price
        turn = served + self._price(now, prompt_price) / part - share.lead
        # The counter of a share without requests is raised to the lowest one. It is then behind shares that wait there.
        arrivals = self._new_arrivals if turn > least else Amount()
        lead = turn - standing.counters
        for other in _YIELDED_TO[rank]:
            lead[standing.is_of_rank[other]] = np.inf
        for other in _YIELDING[rank]:
            lead[standing.is_of_rank[other]] = -np.inf
        columns = self._columns[:, : len(self._active)]
        is_level = lead == 0
        if is_level.any():
            lead[is_level & (columns[_RUNNING] > num_running)] = -np.inf
        if asking is not None and asking.index is not None:
            lead[asking.index] = -np.inf
        # The request with which the counter reaches the turn begins, too.
        most = np.where(lead >= 0, lead * columns[_PART] + standing.next_price, 0)
        grows = (most > standing.price) & standing.is_asking
        begun = np.where(grows, 0, _part(most, standing.price))
        now.add(Amount(*(standing.asked[:2] @ begun).tolist()))
        most = np.where(grows, most, 0)
        return Ahead(now, arrivals, standing.asked, standing.price, standing.price_per_s, most)

    def _stand(self) -> _Standing:
        columns, least = self._columns[:, : len(self._active)], self._least_served()
        prompt_prices, answer_price = columns[_PROMPT_PRICE], OUTPUT_PRICE * self._answer_tokens
        price = prompt_prices * columns[_TOKENS] + answer_price * columns[_SEQUENCES]
        return _Standing(
            least=least,
            counters=np.maximum(columns[_SERVED], least) - columns[_LEAD],
            is_of_rank=[columns[_RANK] == rank for rank in _RANKS],
            asked=columns[_TOKENS : _SEQUENCES_PER_S + 1],
            price=price,
            price_per_s=prompt_prices * columns[_TOKENS_PER_S] + answer_price * columns[_SEQUENCES_PER_S],
            next_price=price / np.maximum(columns[_SEQUENCES], 1),
            is_asking=columns[_SEQUENCES_PER_S] > 0,
        )

    def _least_served(self) -> float:
        """The counter to which that of a share is raised when it begins to wait, so that it saves up no credit."""
        columns = self._columns[:, : len(self._active)]
        has_waiting = any(amount.sequences for amount in self.waiting)
        served = columns[_SERVED][columns[_SEQUENCES if has_waiting else _RUNNING] > 0]
        return max(self._floor, float(served.min()) if served.size else self._last_served)

    def _price(self, amount: Amount, prompt_price: float) -> float:
        return prompt_price * amount.prompt_tokens + OUTPUT_PRICE * self._answer_tokens * amount.sequences

    def _count_waiting(self, request: _Request, sign: int) -> None:
        request.asking.waiting.add(request.needs, sign)
        self.waiting[request.asking.rank].add(request.needs, sign)
        if not request.is_pooled:
            self._num_awaited += sign * request.needs.sequences

    def _store(self, asking: _Asking) -> None:
        self._standing = None
        self._columns[:, asking.index] = asking.values()


def _part(most: _Array, price: _Array) -> _Array:
    """The part of what has these prices that begins if no more than `most` does."""
    return np.minimum(most, price) / np.maximum(price, _LEAST_PRICE)
