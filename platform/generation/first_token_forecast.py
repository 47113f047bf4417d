"""Predicts when a new request would get its first token, from the engine's reports and this gateway's own requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from loramux.engine.protocol.messages import Stats
from loramux.engine.protocol.service_tiers import BACKGROUND_RANK, TIER_FACTORS, makes_room, rank_of

ARRIVALS_S = 2.0
"""Time over which the arrivals of each share are counted, in seconds."""

TIME_CONSTANT_S = 5.0
"""Time after which an older measurement of a rate counts for `1 / e`, in seconds of measured time."""

PREFILL_AGE_S = 60.0
"""Time after which a measured rate of prompt tokens no longer counts, in seconds. Only large steps measure it."""

NUM_ROUNDS = 3
"""Rounds in which a forecast takes the requests into account that arrive while a request waits."""


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


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds until a request's first token. `own_s` would be the time if no other tenant had any requests. `is_next`
    is True if no request waits and a slot is free.
    """

    seconds: float
    own_s: float
    is_next: bool


@dataclass(slots=True, eq=False)
class _Asking:
    """The requests of one share. `share`, `rank` and `part` never change."""

    share: Share
    rank: int
    part: float
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


@dataclass(slots=True)
class _Rate:
    """A rate measured over intervals of different lengths. Newer intervals count more. None before the first."""

    per_s: float | None = None

    def note(self, amount: float, seconds: float) -> None:
        new = amount / seconds
        kept = 0.0 if self.per_s is None else math.exp(-seconds / TIME_CONSTANT_S)
        self.per_s = kept * (self.per_s or 0.0) + (1 - kept) * new


class FirstTokenForecast:
    """The forecast assumes weighted fair queueing (see `FairQueue`): until a share's newest request gets its turn, each
    other share gets what it asks for, but at most in proportion to the weights. Shares go on asking as they did within
    the last seconds. A request must wait for two things, and the longer wait counts:

    - its own prompt and those before it, at the rate at which the engine computes prompts;
    - a sequence slot, at the rate at which running sequences end while all slots are taken.

    Both rates are measured while they are the limit: see `Stats.prefill_s` for the first. Before anything has been
    measured, the forecast is 0. While no sequence ends, the second rate falls.

    `note` takes the engine's reports. `add`, `begin` and `remove` follow this gateway's own requests in between. Thus
    requests that arrive together do not all see the same short queue. What the engine reports beyond them belongs to
    other gateways, and counts like one more tenant. `clock` returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._requests: dict[str, _Request] = {}
        self._shares: dict[Share, _Asking] = {}
        self._counted_since_s = clock()
        self._foreign = [Amount() for _ in range(BACKGROUND_RANK)]
        self._foreign_running = [0.0] * BACKGROUND_RANK
        self._last: tuple[float, Stats] | None = None
        self._prefill, self._drain = _Rate(), _Rate()
        self._prefill_until_s = 0.0
        # Time for which all slots have been taken since the last sequence ended.
        self._full_s = 0.0
        self._max_sequences = 0

    @property
    def drain_per_s(self) -> float | None:
        """Sequences per second that end while all slots are taken. None if not measured yet.

        If no sequence has ended for some time, each slot becomes free at most once in such a time.
        """
        measured = self._drain.per_s
        most = self._max_sequences / self._full_s if self._full_s else None
        return min((rate for rate in (measured, most) if rate is not None), default=None)

    @property
    def num_shares(self) -> int:
        """Number of shares with requests now or in the last seconds."""
        return len(self._shares)

    def add(self, request_id: str, share: Share, prompt_tokens: int, num_sequences: int) -> None:
        """Note that a request is on its way to the engine."""
        asking = self._shares.get(share)
        if asking is None:
            asking = self._shares[share] = _Asking(share, share.rank, share.part)
        needs = Amount(prompt_tokens, num_sequences)
        self._requests[request_id] = _Request(asking, needs)
        asking.waiting.add(needs)
        asking.arrived.add(needs)

    def begin(self, request_id: str) -> None:
        """Note that a request has got its first token. Has no effect on unknown requests."""
        request = self._requests.get(request_id)
        if request is not None and not request.has_begun:
            request.has_begun = True
            request.asking.waiting.add(request.needs, -1)
            request.asking.num_running += request.needs.sequences

    def remove(self, request_id: str) -> None:
        """Note that a request has ended, or was refused. Has no effect on unknown requests."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        if request.has_begun:
            request.asking.num_running -= request.needs.sequences
        else:
            request.asking.waiting.add(request.needs, -1)

    def note(self, stats: Stats) -> None:
        """Take a report of the engine."""
        now_s = self._clock()
        if self._last is not None:
            self._measure(now_s, stats)
        self._last = now_s, stats
        if now_s - self._counted_since_s >= ARRIVALS_S:
            self._count_arrivals(now_s)
        self._max_sequences = stats.max_sequences
        for rank, load in enumerate(stats.service_tiers[:BACKGROUND_RANK]):
            own = [asking for asking in self._shares.values() if asking.rank == rank]
            num_own = sum(asking.waiting.sequences + asking.num_running for asking in own)
            # A sequence that the engine runs may not have sent a token yet, so it counts as waiting here.
            num_foreign = max(0.0, load.num_running + load.num_waiting - num_own)
            self._foreign_running[rank] = min(num_foreign, max(0.0, load.num_running - num_own))
            self._foreign[rank] = Amount(
                max(0.0, load.prompt_tokens - sum(asking.waiting.prompt_tokens for asking in own)),
                num_foreign - self._foreign_running[rank],
            )

    def forecast(self, share: Share, prompt_tokens: int) -> Forecast:
        """Return when the first sequence of a new request, with this prompt, would have its first token."""
        rank, part, tenant_id = share.rank, share.part, share.tenant_id
        own, own_held = Amount(prompt_tokens, 1), 0.0
        num_held = sum(number for other, number in enumerate(self._foreign_running) if not makes_room(other, rank))
        others: list[_Asking] = []
        for asking in self._shares.values():
            is_own = asking.share.tenant_id == tenant_id
            if asking.num_running and not makes_room(asking.rank, rank):
                num_held += asking.num_running
                own_held += asking.num_running if is_own else 0.0
            if is_own and asking.rank <= rank:
                own.add(asking.waiting)
            else:
                others.append(asking)
        seconds = 0.0
        for _ in range(NUM_ROUNDS):
            before = self._before(own, others, rank, part, seconds)
            seconds = self._seconds(before, num_held)
        num_waiting = sum(one.waiting.sequences for one in self._shares.values())
        num_waiting += sum(amount.sequences for amount in self._foreign)
        is_next = num_waiting == 0 and num_held < self._max_sequences
        return Forecast(seconds=seconds, own_s=self._seconds(own, own_held), is_next=is_next)

    def _before(self, own: Amount, others: list[_Asking], rank: int, part: float, seconds: float) -> Amount:
        """Return what must begin until `own` has begun, if that takes these seconds. Most of a forecast's time is spent
        here.
        """
        own_tokens, own_sequences = own.prompt_tokens, own.sequences
        tokens, sequences = own_tokens, own_sequences
        for asking in others:
            waiting, arrivals, ratio = asking.waiting, asking.arrivals, asking.part / part
            asked = waiting.prompt_tokens + seconds * arrivals.prompt_tokens
            most = ratio * own_tokens
            tokens += asked if asked < most else most
            asked = waiting.sequences + seconds * arrivals.sequences
            most = ratio * own_sequences
            sequences += asked if asked < most else most
        for other, amount in enumerate(self._foreign):
            # The weights of other gateways' tenants are not known.
            is_first = other <= rank
            tokens += amount.prompt_tokens if is_first else min(amount.prompt_tokens, own_tokens)
            sequences += amount.sequences if is_first else min(amount.sequences, own_sequences)
        return Amount(tokens, sequences)

    def _seconds(self, before: Amount, num_held: float) -> float:
        """Seconds until everything in `before` has begun, while `num_held` slots are taken."""
        seconds = 0.0
        if self._prefill.per_s and self._clock() < self._prefill_until_s:
            seconds = before.prompt_tokens / self._prefill.per_s
        num_to_end = num_held + before.sequences - self._max_sequences
        if num_to_end > 0 and (drain_per_s := self.drain_per_s) is not None:
            seconds = max(seconds, num_to_end / drain_per_s)
        return seconds

    def _measure(self, now_s: float, stats: Stats) -> None:
        assert self._last is not None
        last_s, last = self._last
        seconds = now_s - last_s
        if seconds <= 0 or stats.num_steps < last.num_steps or stats.max_sequences != last.max_sequences:
            # The engine restarted, or a cluster grew or shrank.
            self._full_s = 0.0
            return
        prefill_s = stats.prefill_s - last.prefill_s
        if prefill_s > 0:
            # Tokens in the prefix cache take no time.
            computed, cached = stats.prompt_tokens - last.prompt_tokens, stats.cached_tokens - last.cached_tokens
            tokens = (stats.prefill_tokens - last.prefill_tokens) * (1 + cached / computed if computed else 1)
            self._prefill.note(tokens * stats.num_engines, prefill_s)
            self._prefill_until_s = now_s + PREFILL_AGE_S
        self._full_s = self._full_s + seconds if _is_full(last) and _is_full(stats) else 0.0
        num_ended = stats.num_ended - last.num_ended
        if num_ended and self._full_s:
            self._drain.note(num_ended, self._full_s)
            self._full_s = 0.0

    def _count_arrivals(self, now_s: float) -> None:
        seconds = now_s - self._counted_since_s
        for share, asking in list(self._shares.items()):
            asking.arrivals = Amount(asking.arrived.prompt_tokens / seconds, asking.arrived.sequences / seconds)
            asking.arrived = Amount()
            if asking.is_idle:
                del self._shares[share]
        self._counted_since_s = now_s


def _is_full(stats: Stats) -> bool:
    """True if every slot is taken by a sequence that is no background sequence."""
    return stats.num_running - stats.num_background_running >= stats.max_sequences > 0
