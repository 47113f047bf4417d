"""What crosses between a running request and admission, one record each."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.platform.ledger.settlement import Settlement
from loramux.platform.quotas.decisions import RateLimit
from loramux.platform.quotas.policies import QuotaPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationRequest:
    """What a request may cost at most: `reserved_tokens` is all prompts plus prompts x n x max_tokens."""

    request_id: str
    tenant_id: str
    api_key_id: str
    model: str
    """As the ledger names it: `tenant/adapter@version` or the served base name."""
    adapter_version_id: str | None
    endpoint: str
    prompt_tokens: int
    reserved_tokens: int
    base: str = ""
    """The served base model that it runs on."""
    end_user: str | None = None
    """Whom the tenant's client named, by `end_user_label`."""
    adapter_id: str | None = None
    """Whose limits hold for it besides the tenant's and the key's."""
    loads_adapter: bool = False
    """Whether the engine does not hold the adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCharge:
    """One load of an adapter that a key asks for ahead of requests. It is used up at once and never given back."""

    tenant_id: str
    api_key_id: str
    adapter_id: str


@dataclass(frozen=True, slots=True)
class Reservation:
    """An open reservation, the rates that bind it, and the policies that it exceeds but that do not refuse."""

    request_id: str
    reserved_tokens: int
    created_us: int
    limits: tuple[RateLimit, ...]
    exceeded: tuple[QuotaPolicy, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """How many tokens a running request has committed so far."""

    request_id: str
    completion_tokens: int


RECOVERED = "recovered"
"""The state of a reservation, and the status of its usage event, whose gateway seems dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """The end of a reservation. With `lease_expires_us`, only while its lease is still that one: a recovery.

    A recovered reservation that is settled after all is corrected by the difference, once.
    """

    request_id: str
    settlement: Settlement
    lease_expires_us: int | None = None
    """None for a settlement by who ran the request."""

    @property
    def is_recovery(self) -> bool:
        return self.lease_expires_us is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """More tokens for an open reservation."""

    request_id: str
    tokens: int


Operation = ReservationRequest | LoadCharge | Extension | Closing
"""What a commit takes: a reservation to open, to extend or to close, or a load to count."""

Outcome = Reservation | bool | Exception
"""A Reservation, or the refusal; of a LoadCharge True, or the refusal; of an Extension whether it was granted; of a
Closing whether it was this one that closed or corrected it. A LookupError where there is no such reservation."""
