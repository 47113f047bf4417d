"""What a key may do. A role is a scope: each says what its holder needs, and scopes add up.

| role | scope | may |
|---|---|---|
| platform admin | `platform:admin` | everything but inference |
| platform viewer | `platform:read` | read everything |
| tenant admin | `tenant:admin` | administer its tenant: keys, adapters, aliases, its display name |
| tenant developer | `tenant:develop` | read its tenant; push and preload versions, move aliases but `default` |
| tenant viewer | `tenant:read` | read its tenant |
| caller | `adapters`, `base` | infer with the tenant's adapters, with the base |
"""

from __future__ import annotations

from collections.abc import Iterable

from loramux.platform.errors import InvalidRequest

TENANT_SCOPES = frozenset({"adapters", "base", "tenant:read", "tenant:develop", "tenant:admin"})
PLATFORM_SCOPES = frozenset({"platform:read", "platform:admin"})
DEFAULT_TENANT_SCOPES = frozenset({"adapters", "base"})
DEFAULT_PLATFORM_SCOPES = frozenset({"platform:admin"})

LIMITABLE_SCOPES = frozenset({"adapters", "base", "tenant:develop"})
"""What a key may do that is limited to some adapters. All that such a key reads is narrowed to them and to itself."""


def checked_scopes(tenant_id: str | None, scopes: Iterable[str] | None) -> frozenset[str]:
    """The scopes of a key of this owner, by default those that suit it; raises InvalidRequest."""
    allowed = PLATFORM_SCOPES if tenant_id is None else TENANT_SCOPES
    if scopes is None:
        return DEFAULT_PLATFORM_SCOPES if tenant_id is None else DEFAULT_TENANT_SCOPES
    granted = frozenset(scopes)
    if not granted or granted - allowed:
        owner = "platform" if tenant_id is None else "tenant"
        raise InvalidRequest(f"scopes of a {owner} key are {', '.join(sorted(allowed))}", param="scopes")
    return granted


def check_limit(scopes: frozenset[str]) -> None:
    """Raises InvalidRequest where a key with these scopes cannot be limited to some adapters."""
    if scopes - LIMITABLE_SCOPES:
        raise InvalidRequest(
            f"only a key whose scopes are among {', '.join(sorted(LIMITABLE_SCOPES))} can be limited to adapters",
            param="adapters",
        )
