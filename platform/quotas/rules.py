"""How each kind of metric is judged, held and charged: arithmetic on counters, without a database."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.platform.periods import NO_WINDOW, Window
from loramux.platform.quotas.counters import UNITS, Counter, CounterKey
from loramux.platform.quotas.metrics import METRICS, Kind, Metric, Unit
from loramux.platform.quotas.policies import ADAPTER, HARD, QuotaPolicy

RETRY_US = 1_000_000
"""How soon what is held now may have been given back."""

NEVER_US = 3_600_000_000
"""What a caller is told to wait where only the operator can change anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a request may use at most."""

    tokens: int
    cost_nanos: int = 0
    loads: int = 0

    def of(self, metric: Metric) -> int:
        """What it would hold of a counter."""
        if metric.unit is Unit.LOADS:
            return self.loads
        if metric.unit is Unit.TOKENS:
            return self.tokens
        if metric.unit is Unit.NANOS:
            return self.cost_nanos
        return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a request has used."""

    tokens: int
    cost_nanos: int = 0
    has_run: bool = True
    has_begun: bool = True

    def keeps(self, metric: Metric) -> bool:
        """Whether what was taken of a rate at admission is gone: a load is, once the engine was asked for it."""
        return self.has_begun if metric.unit is Unit.LOADS else self.has_run

    def of(self, metric: Metric) -> int:
        """What a bucket of tokens or a budget is charged."""
        return self.cost_nanos if metric.unit is Unit.NANOS else self.tokens


@dataclass(frozen=True, slots=True)
class Binding:
    """A policy as it holds for one request: whose count, in which window."""

    policy: QuotaPolicy
    metric: Metric
    key: CounterKey
    window: Window

    @classmethod
    def of(cls, policy: QuotaPolicy, tenant_id: str, window: Window = NO_WINDOW) -> Binding:
        """`tenant_id` is the caller, which has a count of its own where the policy is the platform's or another's."""
        subject_id = policy.subject_id if tenant_id == policy.tenant_id else tenant_id
        return cls(policy, METRICS[policy.metric], CounterKey(policy.id, subject_id, window.start_us), window)

    @property
    def is_anothers(self) -> bool:
        """Whether it limits the calls of an adapter that another tenant has granted to the caller."""
        return self.policy.scope == ADAPTER and self.key.subject_id != self.policy.subject_id

    @property
    def is_hard(self) -> bool:
        return self.policy.mode == HARD

    def current(self, counter: Counter | None, now_us: int) -> Counter:
        """The counter as it stands at `now_us`; a full one where nothing was counted yet."""
        if counter is None:
            return Counter.fresh(self.policy.burst, now_us)
        if self.metric.kind is Kind.RATE:
            return counter.refilled(self.policy.limit, self.policy.burst, now_us)
        return counter

    def never_admits(self, cost: int) -> bool:
        """Whether waiting cannot help, since even an untouched counter is too small; a limit of 0 is no size."""
        if self.policy.limit == 0 or self.metric.kind is Kind.CONCURRENCY:
            return False
        return cost > (self.policy.burst if self.metric.kind is Kind.RATE else self.policy.limit)

    def wait_us(self, counter: Counter, cost: int, now_us: int) -> int:
        """How long until the policy may admit `cost`: 0 when it does now."""
        limit = self.policy.limit
        if self.metric.kind is Kind.RATE:
            if counter.free_units >= cost * UNITS:
                return 0
            return counter.wait_us(cost, limit, now_us) if limit else NEVER_US
        if counter.used + counter.reserved + cost <= limit:
            return 0
        if counter.used + cost <= limit:
            # Running requests hold the rest, and may give some of it back.
            return RETRY_US
        if self.metric.kind is Kind.BUDGET and limit:
            return max(RETRY_US, self.window.end_us - now_us)
        return NEVER_US

    def remaining(self, counter: Counter) -> int:
        """What is free now, in whole requests, tokens or nanos."""
        if self.metric.kind is Kind.RATE:
            return max(0, counter.free_units // UNITS)
        return max(0, self.policy.limit - counter.used - counter.reserved)

    def reset_us(self, counter: Counter, now_us: int) -> int:
        """Time until all of it is free again if nothing more is used."""
        if self.metric.kind is Kind.RATE:
            return counter.wait_us(self.policy.burst, self.policy.limit, now_us) if self.policy.limit else 0
        return max(0, self.window.end_us - now_us) if self.metric.kind is Kind.BUDGET else 0

    def is_charged(self, cost: int, is_exceeded: bool) -> bool:
        """Whether an admitted request holds something of the counter.

        A budget tells what was used, whatever its mode. Of rates and concurrency a request beyond a limit that only
        reports takes nothing, as if it had been refused, so that exactly those are reported that a hard limit refuses.
        """
        return self.metric.kind is Kind.BUDGET or (cost > 0 and not is_exceeded)

    def take(self, counter: Counter, cost: int) -> Counter:
        """Hold `cost`. Requests and loads are used at once, what tokens and money will be is known at the end."""
        if self.metric.kind is Kind.RATE and self.metric.unit is not Unit.TOKENS:
            return counter.changed(level=-cost * UNITS)
        return counter.changed(reserved=cost)

    @property
    def is_extended(self) -> bool:
        """Whether a request that wants more tokens wants more of this."""
        return self.metric.unit in (Unit.TOKENS, Unit.NANOS)

    def is_settled_by(self, spent: Spent) -> bool:
        """Whether the end of a request changes the count: what was used up at admission stays so."""
        return self.metric.kind is not Kind.RATE or self.metric.unit is Unit.TOKENS or not spent.keeps(self.metric)

    def give_back(self, counter: Counter, held: int, spent: Spent) -> Counter:
        """What a request held is released, and what it used is gone."""
        if self.metric.kind is Kind.CONCURRENCY:
            return counter.changed(reserved=-held)
        if self.metric.kind is Kind.BUDGET:
            return counter.changed(reserved=-held, used=spent.of(self.metric))
        if self.metric.unit is Unit.TOKENS:
            return counter.changed(reserved=-held, level=-spent.of(self.metric) * UNITS)
        return counter if spent.keeps(self.metric) else self._filled(counter, held)

    def is_overdrawn(self, counter: Counter) -> bool:
        """Whether more is used and held than the policy ever admits."""
        if self.metric.kind is Kind.RATE:
            return counter.free_units < 0
        return self.metric.kind is Kind.BUDGET and counter.used + counter.reserved > self.policy.limit

    def correct(self, counter: Counter, held: int, charged: Spent, truth: Spent) -> Counter:
        """A request that was charged by a guess turned out to have cost something else."""
        more = truth.of(self.metric) - charged.of(self.metric)
        if self.metric.kind is Kind.CONCURRENCY:
            return counter
        if self.metric.kind is Kind.BUDGET:
            return counter.changed(used=more)
        if self.metric.unit is Unit.TOKENS:
            return self._filled(counter, -more)
        return counter if truth.keeps(self.metric) else self._filled(counter, held)

    def _filled(self, counter: Counter, amount: int) -> Counter:
        """A bucket with so much more in it, up to its size."""
        return counter.changed(level=min(amount * UNITS, self.policy.burst * UNITS - counter.level))
