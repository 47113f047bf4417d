"""What tokens cost, without a database: prices, which of them holds when, and the cost of a request.

Everything is a whole number of nanos, billionths of the currency's unit. Prices are for a million tokens, as people
quote them, so that also the cheapest are whole. The cost of a request is rounded up to a whole nano, once: it is then
an integer that sums exactly, it never falls when tokens are added, and what is held for parts of a request always
covers the whole of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

MILLION = 1_000_000
MAX_PRICE_NANOS = 10_000 * 1_000_000_000
"""10,000 of the currency for a million tokens: the cost of 10^14 tokens still fits a 64-bit column."""

GENERAL_SCOPES = ALL, BASE, ADAPTERS = ("all", "base", "adapters")
"""Those that name no single adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Nanos for a million tokens of each kind, from `effective_us` until the next price of the same owner and scope.

    `tenant_id` None is the list price. `scope` is `all`, `base`, `adapters` or one adapter's identifier.
    """

    id: str
    tenant_id: str | None
    scope: str
    currency: str
    prompt_nanos: int
    cached_nanos: int
    """For those tokens of the prompt that the prefix cache held; never more than `prompt_nanos`."""
    completion_nanos: int
    effective_us: int
    created_us: int


def cost_of(price: Price | None, prompt: int, cached: int, completion: int) -> int:
    """Nanos for a request with so many tokens, `cached` of which are part of `prompt`; 0 where there is no price."""
    if price is None:
        return 0
    total = (prompt - cached) * price.prompt_nanos + cached * price.cached_nanos + completion * price.completion_nanos
    return -(-total // MILLION)


class PriceBook:
    """All prices as they were read, and until when that reading is the truth.

    A price is announced before it takes effect and never changes after that, so that what holds at any time before
    `known_until_us` can no longer change.
    """

    def __init__(self, prices: Iterable[Price], known_until_us: int) -> None:
        self.known_until_us = known_until_us
        self._by_scope: dict[tuple[str | None, str], list[Price]] = {}
        for price in sorted(prices, key=lambda price: price.effective_us):
            self._by_scope.setdefault((price.tenant_id, price.scope), []).append(price)

    @property
    def is_empty(self) -> bool:
        return not self._by_scope

    def price_of(self, tenant_id: str, adapter_id: str | None, at_us: int) -> Price | None:
        """What a tenant pays for an adapter, or for the base where `adapter_id` is None, at a time.

        The tenant's own prices come before the list, and within each the adapter's before those for the kind of
        model before those for all. None: it costs nothing.
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
                    return prices[index - 1]
        return None
