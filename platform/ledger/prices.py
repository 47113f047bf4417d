"""Computes the price in force at a given time and the cost of a request, without a database.

All amounts are whole numbers of nanos. A nano is a billionth of the currency's unit. Prices are per million tokens, so
that even the lowest prices are whole numbers. The cost of a request is rounded up once, to a whole nano. Costs are
therefore integers and add up exactly. More tokens never cost less, and the amounts reserved for the parts of a request
always cover the whole request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

from loramux.engine.protocol.service_tiers import DEFAULT_TIER

MILLION = 1_000_000
BATCHES = "batches"
"""The endpoint of requests of batches in the ledger, which are charged at `batch_percent` of a price."""

MAX_PRICE_NANOS = 10_000 * 1_000_000_000
"""Highest price: 10,000 currency units per million tokens.

At this price, the cost of 9 * 10^11 tokens still fits in a 64-bit column. At MAX_PERCENT of it, that of 9 * 10^10 does.
"""

MAX_PERCENT = 1000
"""Most that requests of a service tier pay, in percent of a price."""

BATCH_RATE = "batch"
"""The rate of requests of batches. The rates of other requests are named after their service tiers."""

PURGED = ""
"""Stands for the adapter of a version that was purged between a request's admission and its end. Such a request is
charged at the price for `adapters`, never at the base's.
"""

GENERAL_SCOPES = ALL, BASE, ADAPTERS = ("all", "base", "adapters")
"""All scopes except individual adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Nanos per million tokens of each kind, from `effective_us` until the next price for the same owner and scope.

    `tenant_id` is None for a list price. `scope` is `all`, `base`, `adapters` or one adapter's identifier.
    """

    id: str
    tenant_id: str | None
    scope: str
    currency: str
    prompt_nanos: int
    cached_nanos: int
    """The price of prompt tokens found in the prefix cache. It is at most `prompt_nanos`."""
    completion_nanos: int
    batch_percent: int = 100
    """What requests of batches pay, in percent of the other amounts, from 0 to 100."""
    flex_percent: int = 100
    priority_percent: int = 100
    """What requests of these service tiers pay, in percent of the other amounts, from 0 to MAX_PERCENT."""
    effective_us: int
    created_us: int

    def at_rate(self, rate: str) -> Price:
        """Return what requests of a rate pay: see `rate_of`. Each amount is rounded up to a whole nano per million
        tokens.
        """
        percents = {BATCH_RATE: self.batch_percent, "flex": self.flex_percent, "priority": self.priority_percent}
        percent = percents.get(rate, 100)
        return replace(
            self,
            prompt_nanos=-(-self.prompt_nanos * percent // 100),
            cached_nanos=-(-self.cached_nanos * percent // 100),
            completion_nanos=-(-self.completion_nanos * percent // 100),
        )


def rate_of(endpoint: str, service_tier: str) -> str:
    """Return the rate of a request: BATCH_RATE if its endpoint is BATCHES, otherwise its service tier."""
    return BATCH_RATE if endpoint == BATCHES else service_tier


def cost_of(price: Price | None, prompt: int, cached: int, completion: int) -> int:
    """Return the cost of a request in nanos, or 0 without a price. `cached` tokens are part of `prompt`."""
    if price is None:
        return 0
    total = (prompt - cached) * price.prompt_nanos + cached * price.cached_nanos + completion * price.completion_nanos
    return -(-total // MILLION)


class PriceBook:
    """A snapshot of all prices, valid until `known_until_us`.

    Prices are added before they take effect and never change afterwards. The price at any time before `known_until_us`
    is therefore final.
    """

    def __init__(self, prices: Iterable[Price], known_until_us: int) -> None:
        self.known_until_us = known_until_us
        self._by_scope: dict[tuple[str | None, str], list[Price]] = {}
        for price in sorted(prices, key=lambda price: price.effective_us):
            self._by_scope.setdefault((price.tenant_id, price.scope), []).append(price)

    def price_of(self, tenant_id: str, adapter_id: str | None, at_us: int, rate: str = DEFAULT_TIER) -> Price | None:
        """Return the price that a tenant pays at `at_us` for an adapter, or for the base if `adapter_id` is None.

        The amounts are what a request of the rate pays: see `rate_of`.

        The tenant's own prices take precedence over list prices. For each owner, the price for the adapter itself comes
        first, then the price for `adapters` or `base`, then the price for `all`. Returns None if there is no price.
        """
        if not self._by_scope:
            return None
        scopes = (BASE, ALL) if adapter_id is None else (adapter_id, ADAPTERS, ALL)
        for owner in (tenant_id, None):
            for scope in scopes:
                prices = self._by_scope.get((owner, scope))
                if prices is None:
                    continue
                index = bisect_right(prices, at_us, key=lambda price: price.effective_us)
                if index:
                    return prices[index - 1] if rate == DEFAULT_TIER else prices[index - 1].at_rate(rate)
        return None
