"""The metrics that policies can limit, each with its kind, its unit, and the window of a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from loramux.platform.amounts import BYTES_UNIT, NANOS_UNIT, amount_text
from loramux.platform.periods import Period

MAX_RATE = 100_000_000_000
"""Highest limit or burst of a rate. In bucket units, it still fits in a 64-bit column."""

MAX_AMOUNT = 10**18
"""Highest limit of any other metric: a billion currency units in nanos. Twice this limit fits in a 64-bit column."""


class Kind(StrEnum):
    RATE = "rate"
    """A bucket that refills."""
    CONCURRENCY = "concurrency"
    """The amount reserved by running requests."""
    BUDGET = "budget"
    """The amount used in a day or a month of the tenant's timezone."""
    STOCK = "stock"
    """The stored amount, counted in the database whenever a tenant adds to it."""


class Unit(StrEnum):
    REQUESTS = "requests"
    TOKENS = "tokens"
    NANOS = NANOS_UNIT
    """Billionths of the currency's unit."""
    ADAPTERS = "adapters"
    BYTES = BYTES_UNIT
    LOADS = "loads"
    """Loads of adapters that are not in the engine's memory."""


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    kind: Kind
    unit: Unit
    period: Period | None = None
    is_for_batches: bool = False
    """True if only requests of batches count."""

    @property
    def max_limit(self) -> int:
        return MAX_RATE if self.kind is Kind.RATE else MAX_AMOUNT

    def text(self, amount: int) -> str:
        """Format an amount for people: see `amount_text`."""
        return amount_text(amount, self.unit)

    @property
    def scopes(self) -> tuple[str, ...]:
        """The scopes of policies that can limit the metric. A stock has no limits per key or adapter."""
        return ("platform", "tenant") if self.kind is Kind.STOCK else ("platform", "tenant", "key", "adapter")


REQUESTS_PER_MINUTE = "requests_per_minute"
TOKENS_PER_MINUTE = "tokens_per_minute"
COLD_LOADS_PER_MINUTE = "cold_loads_per_minute"
CONCURRENT_REQUESTS = "concurrent_requests"
TOKENS_PER_DAY = "tokens_per_day"
BATCH_TOKENS_PER_DAY = "batch_tokens_per_day"
TOKENS_PER_MONTH = "tokens_per_month"
COST_PER_DAY = "cost_per_day"
COST_PER_MONTH = "cost_per_month"
ADAPTERS = "adapters"
ADAPTER_BYTES = "adapter_bytes"
STORED_BYTES = "stored_bytes"

METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(REQUESTS_PER_MINUTE, Kind.RATE, Unit.REQUESTS),
        Metric(TOKENS_PER_MINUTE, Kind.RATE, Unit.TOKENS),
        Metric(COLD_LOADS_PER_MINUTE, Kind.RATE, Unit.LOADS),
        Metric(CONCURRENT_REQUESTS, Kind.CONCURRENCY, Unit.REQUESTS),
        Metric(TOKENS_PER_DAY, Kind.BUDGET, Unit.TOKENS, Period.DAY),
        Metric(BATCH_TOKENS_PER_DAY, Kind.BUDGET, Unit.TOKENS, Period.DAY, is_for_batches=True),
        Metric(TOKENS_PER_MONTH, Kind.BUDGET, Unit.TOKENS, Period.MONTH),
        Metric(COST_PER_DAY, Kind.BUDGET, Unit.NANOS, Period.DAY),
        Metric(COST_PER_MONTH, Kind.BUDGET, Unit.NANOS, Period.MONTH),
        Metric(ADAPTERS, Kind.STOCK, Unit.ADAPTERS),
        Metric(ADAPTER_BYTES, Kind.STOCK, Unit.BYTES),
        Metric(STORED_BYTES, Kind.STOCK, Unit.BYTES),
    )
}

BUDGET_PAIRS = ((TOKENS_PER_DAY, TOKENS_PER_MONTH), (COST_PER_DAY, COST_PER_MONTH))
"""Pairs of a daily and a monthly budget in the same unit."""
