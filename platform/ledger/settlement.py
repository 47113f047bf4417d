"""The final, billable usage of one request."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.platform.ledger.prices import Price, cost_of

MODEL_FAILED = "model_failed"
"""The status of a failed request if the fault may be the model's or its adapter's."""
FAILURES = ("failed", MODEL_FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The actual, billable usage of one request.

    `status` is `completed`, `aborted`, `failed`, MODEL_FAILED or `recovered`. `has_run` is False if the engine never
    ran the request. Such a request costs nothing and does not count against request limits.
    """

    status: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    first_token_us: int | None = None
    has_run: bool = True
    has_begun: bool = True
    """False if the request was never submitted to the engine. Its cold load then does not count against limits either.
    """

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def cost_nanos(self, price: Price | None) -> int:
        return cost_of(price, self.prompt_tokens, self.cached_tokens, self.completion_tokens)
