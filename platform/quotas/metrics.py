"""What can be limited: every metric with its kind, its unit, and the window of a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from loramux.platform.periods import Period

MAX_RATE = 100_000_000_000
"""The highest limit or burst of a rate: in the units of its bucket it still fits a 64-bit column."""

MAX_AMOUNT = 10**18
"""The highest limit of anything else, a thousand million dollars in nanos: sums of two still fit a 64-bit column."""


class Kind(StrEnum):
    """How a metric is counted."""

    RATE = "rate"
    """A bucket that refills."""
    CONCURRENCY = "concurrency"
    """What is held now."""
    BUDGET = "budget"
    """What is used in a day or a month of the tenant's timezone."""
    STOCK = "stock"
    """What there is: counted where it is kept, when more is added."""


class Unit(StrEnum):
    """What a metric counts."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    NANOS = "nanos"
    """A thousand-millionth of the currency of the prices."""
    ADAPTERS = "adapters"
    BYTES = "bytes"
    LOADS = "loads"
    """Of an adapter that the engine does not hold."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One thing that a policy can limit."""

    name: str
    kind: Kind
    unit: Unit
    period: Period | None = None

    @property
    def max_limit(self) -> int:
        return MAX_RATE if self.kind is Kind.RATE else MAX_AMOUNT

    @property
    def scopes(self) -> tuple[str, ...]:
        """Whose policies may limit it: what is kept belongs to a tenant, whichever key brought it."""
        return ("platform", "tenant") if self.kind is Kind.STOCK else ("platform", "tenant", "key", "adapter")


REQUESTS_PER_MINUTE = "requests_per_minute"
TOKENS_PER_MINUTE = "tokens_per_minute"
COLD_LOADS_PER_MINUTE = "cold_loads_per_minute"
CONCURRENT_REQUESTS = "concurrent_requests"
TOKENS_PER_DAY = "tokens_per_day"
TOKENS_PER_MONTH = "tokens_per_month"
COST_PER_DAY = "cost_per_day"
COST_PER_MONTH = "cost_per_month"
ADAPTERS = "adapters"
ADAPTER_BYTES = "adapter_bytes"

METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(REQUESTS_PER_MINUTE, Kind.RATE, Unit.REQUESTS),
        Metric(TOKENS_PER_MINUTE, Kind.RATE, Unit.TOKENS),
        Metric(COLD_LOADS_PER_MINUTE, Kind.RATE, Unit.LOADS),
        Metric(CONCURRENT_REQUESTS, Kind.CONCURRENCY, Unit.REQUESTS),
        Metric(TOKENS_PER_DAY, Kind.BUDGET, Unit.TOKENS, Period.DAY),
        Metric(TOKENS_PER_MONTH, Kind.BUDGET, Unit.TOKENS, Period.MONTH),
        Metric(COST_PER_DAY, Kind.BUDGET, Unit.NANOS, Period.DAY),
        Metric(COST_PER_MONTH, Kind.BUDGET, Unit.NANOS, Period.MONTH),
        Metric(ADAPTERS, Kind.STOCK, Unit.ADAPTERS),
        Metric(ADAPTER_BYTES, Kind.STOCK, Unit.BYTES),
    )
}

BUDGET_PAIRS = ((TOKENS_PER_DAY, TOKENS_PER_MONTH), (COST_PER_DAY, COST_PER_MONTH))
"""A day and the month that contains it."""
