"""Records that a running request and admission exchange."""

from __future__ import annotations

from dataclasses import dataclass

from loramux.engine.protocol.service_tiers import DEFAULT_TIER
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.quotas.decisions import RateLimit
from loramux.platform.quotas.policies import QuotaPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationRequest:
    request_id: str
    tenant_id: str
    api_key_id: str
    model: str
    """The model's name in the ledger: `tenant/adapter@version` or the served base name."""
    adapter_version_id: str | None
    endpoint: str
    """The endpoint in the ledger. It is `BATCHES` for requests of batches."""
    prompt_tokens: int
    reserved_tokens: int
    num_sequences: int = 1
    """Number of choices. Each reserves max_tokens."""
    base: str = ""
    """The served base model that the request runs on."""
    end_user: str | None = None
    service_tier: str = DEFAULT_TIER
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
    request_id: str
    reserved_tokens: int
    created_us: int
    limits: tuple[RateLimit, ...]
    exceeded: tuple[QuotaPolicy, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestCheckpoint:
    """The number of completion tokens that a request has delivered so far."""

    request_id: str
    completion_tokens: int


RECOVERED = "recovered"
"""The state of a reservation that was recovered because its gateway seemed dead, and the status of its usage event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """Ends a reservation, by a settlement or a recovery.

    A recovery applies only if the lease has not changed since the recovery read it. If a recovered reservation is
    settled later, the difference is corrected once.
    """

    request_id: str
    settlement: Settlement
    lease_expires_us: int | None = None
    """Expiry of the lease that a recovery found. None for a settlement by the gateway that ran the request."""

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

For a ReservationRequest, it is the Reservation or the refusal. For a LoadCharge, it is True or the refusal. For an
Extension, it is True if granted. For a Closing, it is True if the reservation was closed or corrected. For an unknown
reservation, it is a LookupError.
"""
