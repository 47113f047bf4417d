"""Checks, reserves and charges each kind of metric, as arithmetic on counters without a database."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.platform.periods import NO_WINDOW, Window
from loramux.platform.quotas.counters import UNITS, Counter, CounterKey
from loramux.platform.quotas.demand import Spent
from loramux.platform.quotas.metrics import METRICS, Kind, Metric, Unit
from loramux.platform.quotas.policies import ADAPTER, HARD, QuotaPolicy

RETRY_US = 1_000_000
"""Suggested wait, in microseconds, while running requests may still release enough."""

NEVER_US = 3_600_000_000
"""Suggested wait, in microseconds, if waiting alone does not help."""


@dataclass(frozen=True, slots=True)
class Binding:
    """A policy applied to one request, with the counter and the window to use."""

    policy: QuotaPolicy
    metric: Metric
    key: CounterKey
    window: Window

    @classmethod
    def of(cls, policy: QuotaPolicy, tenant_id: str, window: Window = NO_WINDOW) -> Binding:
        """Bind a policy to the caller's tenant.

        If the policy belongs to the platform or to another tenant, each calling tenant has a separate counter.
        """
        subject_id = policy.subject_id if tenant_id == policy.tenant_id else tenant_id
        return cls(policy, METRICS[policy.metric], CounterKey(policy.id, subject_id, window.start_us), window)

    @property
    def is_anothers(self) -> bool:
        """True if the policy limits calls to an adapter that another tenant has granted to the caller."""
        return self.policy.scope == ADAPTER and self.key.subject_id != self.policy.subject_id

    @property
    def is_hard(self) -> bool:
        return self.policy.mode == HARD

    def current(self, counter: Counter | None, now_us: int) -> Counter:
        if counter is None:
            return Counter.fresh(self.policy.burst, now_us)
        if self.metric.kind is Kind.RATE:
            return counter.refilled(self.policy.limit, self.policy.burst, now_us)
        return counter

    def never_admits(self, cost: int) -> bool:
        """True if even an unused counter could not admit `cost`. False for a limit of 0 and for concurrency limits."""
        if self.policy.limit == 0 or self.metric.kind is Kind.CONCURRENCY:
            return False
        return cost > self.capacity

    @property
    def capacity(self) -> int:
        """The most that an unused counter admits at once."""
        return self.policy.burst if self.metric.kind is Kind.RATE else self.policy.limit

    def wait_us(self, counter: Counter, cost: int, now_us: int) -> int:
        """Return the microseconds until the policy may admit `cost`, or 0 if it admits `cost` now."""
        limit = self.policy.limit
        if self.metric.kind is Kind.RATE:
            if counter.free_units >= cost * UNITS:
                return 0
            return counter.wait_us(cost, limit, now_us) if limit else NEVER_US
        if counter.used + counter.reserved + cost <= limit:
            return 0
        if counter.used + cost <= limit:
            # Running requests have reserved the rest and may release some of it.
            return RETRY_US
        if self.metric.kind is Kind.BUDGET and limit:
            return max(RETRY_US, self.window.end_us - now_us)
        return NEVER_US

    def remaining(self, counter: Counter) -> int:
        """Return the amount free now, in whole units of the metric."""
        if self.metric.kind is Kind.RATE:
            return max(0, counter.free_units // UNITS)
        return max(0, self.policy.limit - counter.used - counter.reserved)

    def reset_us(self, counter: Counter, now_us: int) -> int:
        """Return the microseconds until the whole limit is free again if nothing more is used.

        Returns 0 if waiting does not free the limit.
        """
        if self.metric.kind is Kind.RATE:
            return counter.wait_us(self.policy.burst, self.policy.limit, now_us) if self.policy.limit else 0
        return max(0, self.window.end_us - now_us) if self.metric.kind is Kind.BUDGET else 0

    def is_charged(self, cost: int, is_exceeded: bool) -> bool:
        """Return whether an admitted request is charged to the counter.

        A budget counts all usage, in any mode. A soft or shadow limit on a rate or on concurrency does not charge
        requests beyond the limit, so it reports exactly the requests that a hard limit would refuse.
        """
        return self.metric.kind is Kind.BUDGET or (cost > 0 and not is_exceeded)

    def take(self, counter: Counter, cost: int) -> Counter:
        """Charge `cost`. A rate of requests or loads counts it as used immediately. Other metrics reserve it until
        settlement.
        """
        if self.metric.kind is Kind.RATE and self.metric.unit is not Unit.TOKENS:
            return counter.changed(level=-cost * UNITS)
        return counter.changed(reserved=cost)

    @property
    def is_extended(self) -> bool:
        """True if an extension by more tokens uses more of this metric."""
        return self.metric.unit in (Unit.TOKENS, Unit.NANOS)

    def is_settled_by(self, spent: Spent) -> bool:
        """True if a settlement changes the counter. Rates of requests and loads are charged at admission."""
        return self.metric.kind is not Kind.RATE or self.metric.unit is Unit.TOKENS or not spent.keeps(self.metric)

    def give_back(self, counter: Counter, held: int, spent: Spent) -> Counter:
        """Release the amount that a request reserved, and charge the amount that it used."""
        if self.metric.kind is Kind.CONCURRENCY:
            return counter.changed(reserved=-held)
        if self.metric.kind is Kind.BUDGET:
            return counter.changed(reserved=-held, used=spent.of(self.metric))
        if self.metric.unit is Unit.TOKENS:
            return counter.changed(reserved=-held, level=-spent.of(self.metric) * UNITS)
        return counter if spent.keeps(self.metric) else self._filled(counter, held)

    def is_overdrawn(self, counter: Counter) -> bool:
        """True if a budget's used and reserved amounts exceed its limit, or if a bucket holds less than its reserved
        amount.
        """
        if self.metric.kind is Kind.RATE:
            return counter.free_units < 0
        return self.metric.kind is Kind.BUDGET and counter.used + counter.reserved > self.policy.limit

    def correct(self, counter: Counter, held: int, charged: Spent, truth: Spent) -> Counter:
        """Correct the charge of a recovered request to its actual usage."""
        more = truth.of(self.metric) - charged.of(self.metric)
        if self.metric.kind is Kind.CONCURRENCY:
            return counter
        if self.metric.kind is Kind.BUDGET:
            return counter.changed(used=more)
        if self.metric.unit is Unit.TOKENS:
            return self._filled(counter, -more)
        return counter if truth.keeps(self.metric) else self._filled(counter, held)

    def _filled(self, counter: Counter, amount: int) -> Counter:
        """Return the bucket with `amount` added, up to the bucket's size."""
        return counter.changed(level=min(amount * UNITS, self.policy.burst * UNITS - counter.level))
