"""Predicts when a new request would get its first token, from the engine's reports and this gateway's own requests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from loramux.engine.protocol.messages import Stats
from loramux.engine.protocol.service_tiers import BACKGROUND_RANK, makes_room
from loramux.platform.generation.mirrored_queue import Amount, MirroredQueue, Share

ARRIVALS_S = 2.0
"""Time over which the arrivals of each share are counted, in seconds."""

TIME_CONSTANT_S = 5.0
"""Time after which an older measurement of a rate counts for `1 / e`, in seconds of measured time."""

PREFILL_AGE_S = 60.0
"""Time after which a measured rate of prompt tokens no longer counts, in seconds. Only large steps measure it."""

NUM_ERRORS = 32
"""Number of requests over which the errors of forecasts are averaged."""

NUM_ROUNDS = 2
"""Rounds in which a forecast takes the requests into account that arrive while a request waits."""

_COUNTING = [
    [other for other in range(BACKGROUND_RANK) if not makes_room(other, rank)] for rank in range(BACKGROUND_RANK)
]
"""For each rank, the ranks whose slots and waiting requests count for it."""

_LAST = BACKGROUND_RANK - 1
"""The rank of the last tier."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds until a request's first token. Of these, the queue explains `queued_s`. `own_s` would be the time if no
    other tenant had any requests. `is_next` is True if no request waits for its first token and a slot is free.
    """

    seconds: float
    queued_s: float
    own_s: float
    is_next: bool


@dataclass(slots=True)
class _Rate:
    """A rate measured over intervals of different lengths. Newer intervals count more. None before the first."""

    per_s: float | None = None

    def note(self, amount: float, seconds: float) -> None:
        new = amount / seconds
        kept = 0.0 if self.per_s is None else math.exp(-seconds / TIME_CONSTANT_S)
        self.per_s = kept * (self.per_s or 0.0) + (1 - kept) * new


class FirstTokenForecast:
    """The forecast follows the order of `FairQueue`: see `MirroredQueue`. Shares go on asking as they did within the
    last seconds. A request must wait for two things, and the longer wait counts:

    - its own prompt and those before it, at the rate at which the engine computes prompts;
    - a sequence slot, at the rate at which running sequences end while all slots are taken. The first tier takes the
      slots of running sequences of the last tier, whatever else waits.

    Both rates are measured while they are the limit: see `Stats.prefill_s` for the first. Before anything has been
    measured, the forecast is 0. While no sequence ends, the second rate falls. Unless slots are free for all that
    waits, the mean time by which requests of the tier have lately waited for longer is added: see `correct`.

    `note` takes the engine's reports. `queue` must know this gateway's own requests, which it follows in between. Thus
    requests that arrive together do not all see the same short queue. What the engine reports beyond them belongs to
    other gateways, and counts like one more tenant. `clock` returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.queue = MirroredQueue()
        self._counted_since_s = clock()
        self._foreign = [Amount() for _ in range(BACKGROUND_RANK)]
        self._foreign_running = [0.0] * BACKGROUND_RANK
        self._last: tuple[float, Stats] | None = None
        self._prefill, self._drain = _Rate(), _Rate()
        self._prefill_until_s = 0.0
        # Time for which all slots have been taken since the last sequence ended.
        self._full_s = 0.0
        self._max_sequences = 0
        # By rank, because queues of other tiers say little about one's own.
        self._excess_s = [0.0] * BACKGROUND_RANK

    @property
    def drain_per_s(self) -> float | None:
        """Sequences per second that end while all slots are taken. None if not measured yet.

        If no sequence has ended for some time, each slot becomes free at most once in such a time.
        """
        measured = self._drain.per_s
        most = self._max_sequences / self._full_s if self._full_s else None
        return min((rate for rate in (measured, most) if rate is not None), default=None)

    def note(self, stats: Stats) -> None:
        """Take a report of the engine."""
        now_s = self._clock()
        if self._last is not None:
            self._measure(now_s, stats)
            # A tier that is refused because of its last waits would otherwise have no more of them to learn from.
            kept = math.exp((self._last[0] - now_s) / TIME_CONSTANT_S)
            self._excess_s = [kept * excess_s for excess_s in self._excess_s]
        self._last = now_s, stats
        if now_s - self._counted_since_s >= ARRIVALS_S:
            self.queue.count_arrivals(now_s - self._counted_since_s)
            self._counted_since_s = now_s
        self._max_sequences = stats.max_sequences
        for rank, load in enumerate(stats.service_tiers[:BACKGROUND_RANK]):
            own = self.queue.waiting[rank]
            num_own = own.sequences + self.queue.running[rank]
            # A sequence that the engine runs may not have sent a token yet, so it counts as waiting here.
            num_foreign = max(0.0, load.num_running + load.num_waiting - num_own)
            self._foreign_running[rank] = min(num_foreign, max(0.0, load.num_running - num_own))
            self._foreign[rank] = Amount(
                max(0.0, load.prompt_tokens - own.prompt_tokens), num_foreign - self._foreign_running[rank]
            )

    def correct(self, rank: int, queued_s: float, waited_s: float) -> None:
        """Learn from a request that has got its first token after `waited_s`, while its `Forecast` had this `queued_s`.

        Both are in seconds. A wait for something other than the engine's queue, such as an adapter, teaches nothing.
        """
        self._excess_s[rank] += (max(0.0, waited_s - queued_s) - self._excess_s[rank]) / NUM_ERRORS

    def forecast(self, share: Share, prompt_tokens: int) -> Forecast:
        """Return when the first sequence of a new request, with this prompt, would have its first token."""
        rank, new = share.rank, Amount(prompt_tokens, 1)
        running = [own + foreign for own, foreign in zip(self.queue.running, self._foreign_running, strict=True)]
        num_waiting = [
            one.sequences + foreign.sequences for one, foreign in zip(self.queue.waiting, self._foreign, strict=True)
        ]
        counting = _COUNTING[rank]
        num_held = sum([running[other] for other in counting])
        has_slot = num_held + sum([num_waiting[other] for other in counting]) < self._max_sequences
        own, own_held = self.queue.of_tenant(share)
        own.add(new)
        queued_s = self._until_turn(share, new, num_held)
        if rank == 0 and running[_LAST]:
            first = Amount(prompt_tokens, 1)
            first.add(self.queue.waiting[0])
            first.add(self._foreign[0])
            if first.sequences <= running[_LAST]:
                queued_s = min(queued_s, self._seconds(first, 0.0))
        has_waiting = self.queue.has_waiting or any(amount.sequences for amount in self._foreign)
        return Forecast(
            seconds=queued_s if has_slot else queued_s + self._excess_s[rank],
            queued_s=queued_s,
            own_s=self._seconds(own, own_held),
            is_next=has_slot and not has_waiting,
        )

    def _until_turn(self, share: Share, new: Amount, num_held: float) -> float:
        """Seconds until a new request of a share has begun, if it gets a slot on its turn and other requests keep
        `num_held` slots.
        """
        ahead, own = self.queue.ahead_of(share), self.queue.waiting_of(share)
        own.add(new)
        fixed, own_rank = Amount(new.prompt_tokens, new.sequences), share.rank
        for rank, amount in enumerate(self._foreign):
            # The weights and counters of other gateways' tenants are not known.
            is_first = rank <= own_rank
            fixed.prompt_tokens += amount.prompt_tokens if is_first else min(amount.prompt_tokens, own.prompt_tokens)
            fixed.sequences += amount.sequences if is_first else min(amount.sequences, own.sequences)
        seconds = 0.0
        for _ in range(1 + NUM_ROUNDS if ahead.grows else 1):
            before = ahead.within(seconds)
            before.add(fixed)
            seconds = self._seconds(before, num_held)
        return seconds

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


def _is_full(stats: Stats) -> bool:
    """True if every slot is taken by a sequence that is no background sequence."""
    return stats.num_running - stats.num_background_running >= stats.max_sequences > 0
