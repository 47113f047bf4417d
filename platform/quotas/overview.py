"""The limits of tenants, keys and adapters, their current usage, and admission checks for hypothetical requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection

from loramux.engine.protocol.service_tiers import DEFAULT_TIER
from loramux.migrations.database import Database
from loramux.platform.ledger.price_list import PriceReader
from loramux.platform.ledger.prices import BATCH_RATE
from loramux.platform.periods import Window
from loramux.platform.quotas.counter_rows import CounterRows
from loramux.platform.quotas.counters import Counter, CounterKey
from loramux.platform.quotas.decisions import PolicyVerdict, QuotaExceeded, RequestTooLarge, refusal, verdicts
from loramux.platform.quotas.demand import PricedDemand
from loramux.platform.quotas.metrics import Kind
from loramux.platform.quotas.policies import PLATFORM, QuotaPolicy
from loramux.platform.quotas.policy_cache import PolicyCache
from loramux.platform.quotas.rules import Binding
from loramux.platform.quotas.stock import stock_of


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaCaller:
    """A hypothetical caller: a tenant and, optionally, a key and an adapter. With `is_batch`, a batch of the tenant.

    Its request has the default tier.
    """

    tenant_id: str
    key_id: str | None = None
    adapter_id: str | None = None
    is_batch: bool = False

    @property
    def rate(self) -> str:
        return BATCH_RATE if self.is_batch else DEFAULT_TIER


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveLimit:
    """One policy that applies to a caller, and its current usage. Amounts are in the metric's unit."""

    policy: QuotaPolicy
    is_inherited: bool
    """True if the tenant inherits the policy from the platform."""
    used: int
    """The amount used in a budget's window, taken from a rate's bucket, or stored."""
    reserved: int
    """The amount reserved by running requests or, for a stock, by open uploads."""
    remaining: int
    num_exceeded: int
    """Number of times that a soft or shadow policy admitted or extended a request beyond its limit, in this window or
    in total.
    """
    window: Window | None
    """The window of a budget. None for other kinds."""
    reset_us: int | None
    """When the whole limit is free again if nothing more is used. None for concurrency and stock, which waiting does
    not free.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Admissibility:
    """The result of an admission check: the refusal, if any, and each policy's verdict on the request."""

    refusal: QuotaExceeded | RequestTooLarge | None
    verdicts: tuple[PolicyVerdict, ...]


class QuotaOverview:
    """Reads quotas and their counters without changing or locking anything."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._prices = PriceReader(database)

    def effective(self, caller: QuotaCaller) -> tuple[EffectiveLimit, ...]:
        """List the caller's limits, sorted by metric. For each metric, limits of the tenant come first, then limits of
        the key and of the adapter.
        """
        with self._database.read() as connection:
            # Every limit applies to batches.
            everything = replace(caller, is_batch=True)
            cache, counters, bindings, now_us = self._read(connection, everything, None)
            standing = [(binding, binding.current(counters.get(binding.key), now_us)) for binding in bindings]
            for binding in cache.stock_bindings(caller.tenant_id):
                counter = counters.get(binding.key) or Counter.fresh(0, now_us)
                stock = stock_of(connection, caller.tenant_id, binding.policy.metric, now_us)
                standing.append((binding, counter._replace(used=stock.used, reserved=stock.reserved)))
        limits = [_effective(binding, counter, now_us) for binding, counter in standing]
        return tuple(sorted(limits, key=lambda limit: limit.policy.metric))

    def check(
        self,
        caller: QuotaCaller,
        *,
        prompt_tokens: int,
        completion_tokens: int,
        trial: QuotaPolicy | None = None,
    ) -> Admissibility:
        """Check whether the caller's request would be admitted now, or with the policy `trial` in force.

        `QuotaPolicies.propose` returns such a policy. The check uses the counter of the policy that `trial` would
        change, or an unused counter if `trial` is a new policy.
        """
        with self._database.read() as connection:
            cache, counters, bindings, now_us = self._read(connection, caller, trial)
            price = None
            if cache.has_costs:
                prices = self._prices.book(connection, now_us)
                price = prices.price_of(caller.tenant_id, caller.adapter_id, now_us, caller.rate)
        demand = PricedDemand.of_request(price, prompt_tokens, completion_tokens)
        judged = verdicts(bindings, counters, demand, now_us)
        return Admissibility(refusal=refusal(judged, demand, now_us), verdicts=tuple(judged))

    def _read(
        self, connection: Connection, caller: QuotaCaller, trial: QuotaPolicy | None
    ) -> tuple[PolicyCache, Mapping[CounterKey, Counter], Sequence[Binding], int]:
        moment = self._database.moment(connection)
        cache = PolicyCache(moment.epoch)
        subjects = [one for one in (caller.tenant_id, caller.key_id, caller.adapter_id) if one is not None]
        cache.read(connection, subjects, (caller.tenant_id,))
        if trial is not None:
            cache.put(trial)
            # The trial may be the first policy with a daily or monthly window, which needs timezones.
            cache.read(connection, (), {caller.tenant_id, trial.tenant_id or caller.tenant_id})
        bindings = cache.bindings(caller.tenant_id, caller.key_id, caller.adapter_id, caller.is_batch, moment.now_us)
        rows = CounterRows(connection, is_locking=False)
        rows.read([binding.key for binding in (*bindings, *cache.stock_bindings(caller.tenant_id))])
        return cache, rows.counters, bindings, moment.now_us


def _effective(binding: Binding, counter: Counter, now_us: int) -> EffectiveLimit:
    remaining = binding.remaining(counter)
    is_rate, is_budget = binding.metric.kind is Kind.RATE, binding.metric.kind is Kind.BUDGET
    return EffectiveLimit(
        policy=binding.policy,
        is_inherited=binding.policy.subject_id == PLATFORM,
        used=max(0, binding.policy.burst - remaining - counter.reserved) if is_rate else counter.used,
        reserved=counter.reserved,
        remaining=remaining,
        num_exceeded=counter.exceeded,
        window=binding.window if is_budget else None,
        reset_us=now_us + binding.reset_us(counter, now_us) if is_rate or is_budget else None,
    )
