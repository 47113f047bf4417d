"""The amounts that a request demands of quotas and spends, in every unit. Quotas only compare them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from loramux.platform.ledger.prices import Price, cost_of
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.quotas.metrics import Metric, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedDemand:
    """The maximum amounts that a request can use."""

    amounts: Mapping[Unit, int]
    prompt: Mapping[Unit, int] = field(default_factory=dict)
    """The parts of `amounts` that do not depend on max_tokens."""
    num_sequences: int = 0
    """Number of choices for which max_tokens are reserved. 0 for a demand without a request."""

    @classmethod
    def of_request(
        cls, price: Price | None, prompt_tokens: int, completion_tokens: int, num_sequences: int = 1, loads: int = 0
    ) -> PricedDemand:
        amounts = {
            Unit.REQUESTS: 1,
            Unit.TOKENS: prompt_tokens + completion_tokens,
            Unit.NANOS: cost_of(price, prompt_tokens, 0, completion_tokens),
            Unit.LOADS: loads,
        }
        prompt = {Unit.TOKENS: prompt_tokens, Unit.NANOS: cost_of(price, prompt_tokens, 0, 0)}
        return cls(amounts=amounts, prompt=prompt, num_sequences=num_sequences)

    @classmethod
    def of_extension(cls, price: Price | None, tokens: int) -> PricedDemand:
        return cls(amounts={Unit.TOKENS: tokens, Unit.NANOS: cost_of(price, 0, 0, tokens)})

    def fitting_max_tokens(self, unit: Unit, amount: int) -> int | None:
        """Return the largest max_tokens with which the request needs at most `amount` of tokens or money.

        It is 0 or less if even the prompt needs more. Returns None if max_tokens makes no difference.
        """
        if not self.num_sequences:
            return None
        rest = amount - self.prompt[unit]
        if unit is Unit.TOKENS:
            return rest // self.num_sequences
        max_tokens = (self.amounts[Unit.TOKENS] - self.prompt[Unit.TOKENS]) // self.num_sequences
        nanos = self.amounts[Unit.NANOS] - self.prompt[Unit.NANOS]
        # The cost is rounded up once, so the cost of the answer is less than one nano more than the difference.
        return None if nanos == 0 <= rest else max_tokens * rest // (nanos + 1)


ONE_LOAD = PricedDemand(amounts={Unit.LOADS: 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    tokens: int
    cost_nanos: int
    has_run: bool
    has_begun: bool

    @classmethod
    def by(cls, settlement: Settlement, price: Price | None) -> Spent:
        return cls(
            tokens=settlement.tokens,
            cost_nanos=settlement.cost_nanos(price),
            has_run=settlement.has_run,
            has_begun=settlement.has_begun,
        )

    def keeps(self, metric: Metric) -> bool:
        """Return whether a rate keeps the amount charged at admission. A rate of loads keeps it if the request reached
        the engine. Other rates keep it if the request ran.
        """
        return self.has_begun if metric.unit is Unit.LOADS else self.has_run

    def of(self, metric: Metric) -> int:
        return self.cost_nanos if metric.unit is Unit.NANOS else self.tokens
