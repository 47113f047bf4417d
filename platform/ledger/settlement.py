"""What one request used in the end, which is what it is charged."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.platform.ledger.prices import Price, cost_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The truth of one request. `status` is `completed`, `aborted`, `failed` or `recovered`.

    `has_run` is False for a request that the engine never ran: it costs nothing and its request is given back.
    """

    status: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    first_token_us: int | None = None
    has_run: bool = True
    has_begun: bool = True
    """Whether the engine was asked for it at all; a cold load is given back where it was not."""

    @property
    def tokens(self) -> int:
        """What it is charged."""
        return self.prompt_tokens + self.completion_tokens

    def cost_nanos(self, price: Price | None) -> int:
        """What it costs."""
        return cost_of(price, self.prompt_tokens, self.cached_tokens, self.completion_tokens)
