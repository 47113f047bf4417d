"""What a key is, as it is stored, shown and presented: records without a database."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row

from loramux.platform.accounts.principals import Principal


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key as it may be shown: never its secret. `tenant_id` is None for a platform key."""

    id: str
    tenant_id: str | None
    public_id: str
    name: str
    scopes: frozenset[str]
    adapter_ids: frozenset[str] | None
    """The adapters that it is limited to; None: all that its tenant may call."""
    created_us: int
    expires_us: int | None
    revoked_us: int | None
    previous_until_us: int | None
    """Until when the secret before the last rotation still opens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChanges:
    """What of a key is to change; None leaves it. `adapters` are names as in `create`, and () lifts the limit."""

    name: str | None = None
    scopes: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None
    expires_us: int | None = None


@dataclass(frozen=True, slots=True)
class CreatedKey:
    """A key with its new secret, which is shown this once."""

    key: ApiKey
    secret: str


def key_of(row: Row[Any]) -> ApiKey:
    return ApiKey(
        id=row.id,
        tenant_id=row.tenant_id,
        public_id=row.public_id,
        name=row.name,
        scopes=frozenset(row.scopes),
        created_us=row.created_us,
        adapter_ids=_ids(row),
        expires_us=row.expires_us,
        revoked_us=row.revoked_us,
        previous_until_us=row.previous_until_us,
    )


def principal_of(row: Row[Any]) -> Principal:
    return Principal(
        key_id=row.id,
        tenant_id=row.tenant_id,
        tenant_slug=row.slug,
        scopes=frozenset(row.scopes),
        adapter_ids=_ids(row),
    )


def _ids(row: Row[Any]) -> frozenset[str] | None:
    return None if row.adapter_ids is None else frozenset(row.adapter_ids)


def shown_key(key: ApiKey) -> dict[str, object]:
    """For the audit log."""
    return {
        "name": key.name,
        "scopes": sorted(key.scopes),
        "adapters": None if key.adapter_ids is None else sorted(key.adapter_ids),
        "expires_us": key.expires_us,
        "revoked_us": key.revoked_us,
    }
