"""API keys with their scopes and adapter limits.

Each role is a scope. A key has the combined rights of its scopes: see `docs/security.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, exists, or_, select

from loramux.adapter_store.registry.registry import is_identifier
from loramux.migrations.schema import adapter_grants, adapters, tenants
from loramux.platform.accounts.principals import Principal
from loramux.platform.accounts.tenants import SLUG
from loramux.platform.errors import InvalidRequest, NotFound

TENANT_SCOPES = frozenset({"adapters", "base", "tenant:read", "tenant:develop", "tenant:admin"})
PLATFORM_SCOPES = frozenset({"platform:read", "platform:admin"})
DEFAULT_TENANT_SCOPES = frozenset({"adapters", "base"})
DEFAULT_PLATFORM_SCOPES = frozenset({"platform:admin"})

INHERIT = "inherit"
"""A change of a service tier to that of the tenant."""

LIMITABLE_SCOPES = frozenset({"adapters", "base", "tenant:develop"})
"""The scopes allowed for a key that is limited to some adapters. Such a key can see only those adapters and itself."""


def checked_scopes(tenant_id: str | None, scopes: Iterable[str] | None) -> frozenset[str]:
    """Validate the scopes of a tenant's or the platform's key. None selects the defaults. Raises InvalidRequest."""
    allowed = PLATFORM_SCOPES if tenant_id is None else TENANT_SCOPES
    if scopes is None:
        return DEFAULT_PLATFORM_SCOPES if tenant_id is None else DEFAULT_TENANT_SCOPES
    granted = frozenset(scopes)
    if not granted or granted - allowed:
        owner = "platform" if tenant_id is None else "tenant"
        raise InvalidRequest(f"the scopes of a {owner} key are {', '.join(sorted(allowed))}", param="scopes")
    return granted


def check_limit(scopes: frozenset[str]) -> None:
    """Raise InvalidRequest if a key with these scopes cannot be limited to some adapters."""
    if scopes - LIMITABLE_SCOPES:
        raise InvalidRequest(
            f"only a key with no scopes other than {', '.join(sorted(LIMITABLE_SCOPES))} can be limited to adapters",
            param="adapters",
        )


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, without its secret. `tenant_id` is None for a platform key."""

    id: str
    tenant_id: str | None
    public_id: str
    name: str
    scopes: frozenset[str]
    adapter_ids: frozenset[str] | None
    """The adapters that the key is limited to. None means every adapter that its tenant may call."""
    created_us: int
    expires_us: int | None
    revoked_us: int | None
    previous_until_us: int | None
    """Expiry of the secret that the last rotation replaced, in microseconds since the epoch, or None without one."""
    max_service_tier: str | None = None
    default_service_tier: str | None = None
    """The key's own service tiers, or None for those of its tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChanges:
    """Changes to a key. None leaves a field unchanged.

    `adapters` limits the key to these adapters, as in `ApiKeys.create`. An empty tuple removes the limit. The tier
    `INHERIT` stands for the tenant's.
    """

    name: str | None = None
    scopes: tuple[str, ...] | None = None
    adapters: tuple[str, ...] | None = None
    expires_us: int | None = None
    max_service_tier: str | None = None
    default_service_tier: str | None = None


@dataclass(frozen=True, slots=True)
class CreatedKey:
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
        max_service_tier=row.max_service_tier,
        default_service_tier=row.default_service_tier,
    )


def principal_of(row: Row[Any]) -> Principal:
    return Principal(
        key_id=row.id,
        tenant_id=row.tenant_id,
        tenant_slug=row.slug,
        scopes=frozenset(row.scopes),
        adapter_ids=_ids(row),
        max_service_tier=row.max_service_tier,
        default_service_tier=row.default_service_tier,
    )


def _ids(row: Row[Any]) -> frozenset[str] | None:
    return None if row.adapter_ids is None else frozenset(row.adapter_ids)


def shown_key(key: ApiKey) -> dict[str, object]:
    """Return the fields of a key that the audit log records."""
    return {
        "name": key.name,
        "scopes": sorted(key.scopes),
        "adapters": None if key.adapter_ids is None else sorted(key.adapter_ids),
        "expires_us": key.expires_us,
        "revoked_us": key.revoked_us,
        "max_service_tier": key.max_service_tier,
        "default_service_tier": key.default_service_tier,
    }


def find_adapter_ids(connection: Connection, tenant_id: str, names: Sequence[str]) -> list[str]:
    return sorted({_find_adapter_id(connection, tenant_id, name) for name in names})


def _find_adapter_id(connection: Connection, tenant_id: str, name: str) -> str:
    is_granted = exists().where(adapter_grants.c.adapter_id == adapters.c.id, adapter_grants.c.tenant_id == tenant_id)
    query = select(adapters.c.id).where(or_(adapters.c.tenant_id == tenant_id, is_granted))
    owner, slash, short = name.rpartition("/")
    found = None
    if is_identifier(name):
        found = connection.execute(query.where(adapters.c.id == name)).scalar()
    elif slash and SLUG.fullmatch(owner) and SLUG.fullmatch(short):
        named = query.join(tenants, tenants.c.id == adapters.c.tenant_id)
        found = connection.execute(named.where(tenants.c.slug == owner, adapters.c.name == short)).scalar()
    elif not slash and SLUG.fullmatch(name):
        own = query.where(adapters.c.tenant_id == tenant_id, adapters.c.name == name)
        found = connection.execute(own).scalar()
    if found is None:
        raise NotFound(
            "there is no such adapter, or the tenant has no access to it", param="adapters", code="adapter_not_found"
        )
    return str(found)
