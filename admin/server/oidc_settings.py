"""Single sign-on as the operator set it: the provider, and which of its groups may do what."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

ROLES = ("platform:admin", "platform:read", "tenant:admin", "tenant:develop", "tenant:read")


_SLUG = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class RoleRule:
    """Who has `value` in the roles' claim may do what `scope` says, for `tenant` where that is a tenant's."""

    value: str
    scope: str
    tenant: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OidcSettings:
    """`client_secret` None is a public client, which PKCE alone protects. Of `rules` the first that fits decides."""

    issuer: str
    client_id: str
    client_secret: str | None
    scopes: str
    roles_claim: str
    rules: tuple[RoleRule, ...]
    redirect_url: str | None
    """Where the provider sends browsers back to; None: where they came from."""


def parse_rule(text: str) -> RoleRule:
    """`GROUP=SCOPE` or `GROUP=SCOPE@TENANT`; raises ValueError with a sentence."""
    value, equals, role = text.rpartition("=")
    scope, at, tenant = role.partition("@")
    if not (equals and value) or scope not in ROLES:
        raise ValueError(f"{text!r} is no role: use GROUP=SCOPE or GROUP=SCOPE@TENANT, SCOPE of {', '.join(ROLES)}")
    if scope.startswith("tenant:") != bool(at) or (at and not _SLUG.fullmatch(tenant)):
        raise ValueError(f"{text!r} is no role: tenant:... needs @TENANT, platform:... has none")
    return RoleRule(value, scope, tenant or None)


def is_trusted_url(url: str) -> bool:
    """Whether keys and codes may travel there: over TLS, or on this machine."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    if parts.scheme == "https":
        return bool(parts.hostname)
    if parts.scheme != "http" or not parts.hostname:
        return False
    try:
        return ipaddress.ip_address(parts.hostname).is_loopback
    except ValueError:
        return parts.hostname == "localhost"
