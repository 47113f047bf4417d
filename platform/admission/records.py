"""The records exchanged between a running request and admission."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.platform.ledger.settlement import Settlement
from loramux.platform.quotas.decisions import RateLimit
from loramux.platform.quotas.policies import QuotaPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationRequest:
    """A request's maximum cost. `reserved_tokens` is the number of prompt tokens plus prompts x n x max_tokens."""

    request_id: str
    tenant_id: str
    api_key_id: str
    model: str
    """The model's name in the ledger: `tenant/adapter@version` or the served base name."""
    adapter_version_id: str | None
    endpoint: str
    prompt_tokens: int
    reserved_tokens: int
    base: str = ""
    """The served base model that the request runs on."""
    end_user: str | None = None
    """The end user that the client named, as returned by `end_user_label`."""
    adapter_id: str | None = None
    """The adapter whose limits apply in addition to the tenant's and the key's."""
    loads_adapter: bool = False
    """True if the engine has to load the adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCharge:
    """One adapter load that a key requests ahead of time. It is charged immediately and never refunded."""

    tenant_id: str
    api_key_id: str
    adapter_id: str


@dataclass(frozen=True, slots=True)
class Reservation:
    """An open reservation, the rate limits that apply to it, and the soft or shadow policies that it exceeds."""

    request_id: str
    reserved_tokens: int
    created_us: int
    limits: tuple[RateLimit, ...]
    exceeded: tuple[QuotaPolicy, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Number of tokens that a running request has committed so far."""

    request_id: str
    completion_tokens: int


RECOVERED = "recovered"
"""The state of a reservation whose gateway seems dead, and the status of its usage event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """Ends a reservation.

    A closing with `lease_expires_us` is a recovery, which applies only if the lease is unchanged.

    If a recovered reservation is settled after all, the difference is corrected once.
    """

    request_id: str
    settlement: Settlement
    lease_expires_us: int | None = None
    """Expiry of the lease that a recovery found, or None for a settlement by the gateway that ran the request."""

    @property
    def is_recovery(self) -> bool:
        return self.lease_expires_us is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """More tokens for an open reservation."""

    request_id: str
    tokens: int


Operation = ReservationRequest | LoadCharge | Extension | Closing
"""An operation to commit: a reservation to open, extend or close, or a load to count."""

Outcome = Reservation | bool | Exception
"""The result of an operation.

For a ReservationRequest, it is the Reservation or the refusal; for a LoadCharge, True or the refusal; for an Extension,
True if it was granted; for a Closing, True if it closed or corrected the reservation. For an unknown reservation, it is
a LookupError.
"""
