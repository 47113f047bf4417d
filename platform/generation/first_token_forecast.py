"""Predicts when a new request would get its first token, from the engine's reports and this gateway's own requests."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection
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

NUM_RUNS = 16
"""Number of sequences in each slot over which the time for which they hold it is averaged."""

NUM_ERRORS = 16
"""Number of requests over which the errors of forecasts are averaged, if they come soon after each other."""

ERROR_AGE_S = 10.0
"""Time after which the error of an older forecast counts for `1 / e`, in seconds."""

NUM_DEVIATIONS = 4
"""A forecast exceeds the mean of what such requests waited for by this many times the mean by which they exceeded it,
which is half of the mean deviation.
"""

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


@dataclass(slots=True)
class _RunTimes:
    """For how long sequences hold a slot, from the numbers of sequences that run and that end. A sequence counts for
    `1 / e` once another NUM_RUNS have ended for each that runs. With a fixed number, all that end together could make
    the time for which they ran be forgotten.
    """

    num_running: float = 0.0
    num_ended: float = 0.0
    slots_s: float = 0.0
    """The time for which slots were held, as a sum over all slots."""

    def note(self, num_running: float, seconds: float, num_ended: int) -> None:
        kept = math.exp(-num_ended / (NUM_RUNS * num_running))
        self.num_running = num_running
        self.num_ended = kept * self.num_ended + num_ended
        self.slots_s = kept * self.slots_s + num_running * seconds

    @property
    def mean_s(self) -> float | None:
        """In seconds, or None before anything has been measured. It grows while no sequence ends. Until as many have
        ended as run, it is at most for how long those that run have run.
        """
        num_ended = max(self.num_ended, self.num_running)
        return self.slots_s / num_ended if num_ended else None


@dataclass(slots=True)
class _Excess:
    """For how much longer recent requests waited than the queue explained: the mean, and by how much requests exceeded
    it, as sums over requests. Older requests count less.
    """

    num_noted: float = 0.0
    excess_s: float = 0.0
    above_s: float = 0.0
    noted_s: float = 0.0

    def note(self, excess_s: float, now_s: float) -> None:
        kept = (1 - 1 / NUM_ERRORS) * math.exp((self.noted_s - now_s) / ERROR_AGE_S)
        self.noted_s = now_s
        self.num_noted = kept * self.num_noted + 1
        self.excess_s = kept * self.excess_s + excess_s
        self.above_s = kept * self.above_s + max(0.0, excess_s - self.excess_s / self.num_noted)

    def margin_s(self, now_s: float) -> float:
        """What to add to a forecast, in seconds. It falls if few requests come to learn from, so that a tier whose
        requests are all refused because of the last waits is tried again.
        """
        kept = math.exp((self.noted_s - now_s) / ERROR_AGE_S)
        return kept * (self.excess_s + NUM_DEVIATIONS * self.above_s) / max(1.0, kept * self.num_noted)


class FirstTokenForecast:
    """The forecast follows the order of `FairQueue`: see `MirroredQueue`. Shares go on asking as they did within the
    last seconds. A request must wait for two things, and the longer wait counts:

    - its own prompt and those before it, at the rate at which the engine computes prompts: see `Stats.prefill_s`;
    - a sequence slot. Slots become free at the rate that follows from the mean time for which sequences hold them, but
      none before the sequences that began first have run for as long as answers take after their first token: sequences
      that began together also end together. The first tier takes the slots of running sequences of the last tier,
      whatever else waits.

    The time for which slots are held is measured while at least half are taken, because an engine with less to do is
    faster. Before anything has been measured, the forecast is 0. A margin for waits that the queue does not explain is
    added: see `correct`. If slots are free for all that waits, the margin is at most as long as the wait in the queue.

    `note` takes the engine's reports. `queue` must know this gateway's own requests, which it follows in between. Thus
    requests that arrive together do not all see the same short queue. What the engine reports beyond them belongs to
    other gateways, and counts like one more tenant. `clock` returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.queue = MirroredQueue(clock)
        self._counted_since_s = clock()
        self._foreign = [Amount() for _ in range(BACKGROUND_RANK)]
        self._foreign_running = [0.0] * BACKGROUND_RANK
        self._last: tuple[float, Stats] | None = None
        self._prefill, self._runs = _Rate(), _RunTimes()
        self._prefill_until_s = 0.0
        self._max_sequences = 0
        # By rank, because queues of other tiers say little about one's own, and by whether the adapter is cold.
        self._excess: dict[tuple[int, bool], _Excess] = defaultdict(_Excess)

    def note(self, stats: Stats) -> None:
        """Take a report of the engine."""
        now_s = self._clock()
        if self._last is not None:
            self._measure(now_s, stats)
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

    def correct(self, rank: int, queued_s: float, waited_s: float, is_cold: bool = False) -> None:
        """Learn from a request that has got its first token after `waited_s`, while its `Forecast` had this `queued_s`.

        Both are in seconds. `is_cold` is True if its adapter had to be loaded.
        """
        self._excess[rank, is_cold].note(max(0.0, waited_s - queued_s), self._clock())

    def forecast(self, share: Share, prompt_tokens: int, is_cold: bool = False) -> Forecast:
        """Return when the first sequence of a new request, with this prompt, would have its first token.

        `is_cold` is True if its adapter must be loaded.
        """
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
        now_s = self._clock()
        # A request with a cold adapter also waits in the queue of all others, so their margin is the least.
        margin_s = max(self._excess[rank, one].margin_s(now_s) for one in {False, is_cold})
        if has_slot:
            # Slow loads alone refuse nothing. Otherwise, adapters would not be loaded before the engine is idle.
            margin_s = min(margin_s, queued_s)
        has_waiting = self.queue.has_waiting or any(amount.sequences for amount in self._foreign)
        return Forecast(
            seconds=queued_s + margin_s,
            queued_s=queued_s,
            own_s=max(self._seconds(own, own_held), self._until_ends(own, own_held, counting, share.tenant_id)),
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
            seconds = max(self._seconds(before, num_held), self._until_ends(before, num_held, _COUNTING[own_rank]))
        return seconds

    def _until_ends(
        self, before: Amount, num_held: float, ranks: Collection[int], tenant_id: str | None = None
    ) -> float:
        """Seconds until everything in `before` can begin, if the running sequences of these ranks, and of the tenant if
        there is one, run for the mean time. They hold `num_held` slots.
        """
        num_to_end = round(num_held + before.sequences - self._max_sequences)
        if tenant_id is None:
            # Those of other gateways may end first, because nobody here knows when they began.
            num_to_end -= math.ceil(sum([self._foreign_running[rank] for rank in ranks]))
        if num_to_end <= 0 or not self._max_sequences:
            return 0.0
        now_s = self._clock()
        begun_s = self.queue.begun_s(num_to_end, ranks, tenant_id)
        return self.queue.run_s + (0.0 if begun_s is None else begun_s - now_s)

    def _seconds(self, before: Amount, num_held: float) -> float:
        """Seconds until everything in `before` has begun, while `num_held` slots are taken."""
        seconds = 0.0
        if self._prefill.per_s and self._clock() < self._prefill_until_s:
            seconds = before.prompt_tokens / self._prefill.per_s
        num_to_end = num_held + before.sequences - self._max_sequences
        if num_to_end > 0 and self._max_sequences and (mean_s := self._runs.mean_s) is not None:
            seconds = max(seconds, num_to_end / self._max_sequences * mean_s)
        return seconds

    def _measure(self, now_s: float, stats: Stats) -> None:
        assert self._last is not None
        last_s, last = self._last
        seconds = now_s - last_s
        if seconds <= 0 or stats.num_steps < last.num_steps or stats.max_sequences != last.max_sequences:
            # The engine restarted, or a cluster grew or shrank.
            return
        prefill_s = stats.prefill_s - last.prefill_s
        if prefill_s > 0:
            # Tokens in the prefix cache take no time.
            computed, cached = stats.prompt_tokens - last.prompt_tokens, stats.cached_tokens - last.cached_tokens
            tokens = (stats.prefill_tokens - last.prefill_tokens) * (1 + cached / computed if computed else 1)
            self._prefill.note(tokens * stats.num_engines, prefill_s)
            self._prefill_until_s = now_s + PREFILL_AGE_S
        # Whatever runs at the end of the interval: otherwise, sequences that end together would not count.
        if _is_busy(last):
            self._runs.note((last.num_running + stats.num_running) / 2, seconds, stats.num_ended - last.num_ended)


def _is_busy(stats: Stats) -> bool:
    """True if no background sequence and at least half of the sequences for which there are slots are running."""
    return not stats.num_background_running and 2 * stats.num_running >= stats.max_sequences > 0
