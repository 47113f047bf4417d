"""The operator's single sign-on settings: the provider, and the roles of its groups."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

ROLES = ("platform:admin", "platform:read", "tenant:admin", "tenant:develop", "tenant:read")


_SLUG = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclass(frozen=True, slots=True)
class RoleRule:
    """People with `value` in the roles claim get `scope`, for `tenant` if it is a tenant scope."""

    value: str
    scope: str
    tenant: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OidcSettings:
    """Settings of the provider. The first matching entry of `rules` determines a person's role.

    Without `client_secret`, loramux is a public client, protected only by PKCE.
    """

    issuer: str
    client_id: str
    client_secret: str | None
    scopes: str
    roles_claim: str
    rules: tuple[RoleRule, ...]
    redirect_url: str | None
    """The URL that the provider sends browsers back to. None means the address that the browser used."""


def parse_rule(text: str) -> RoleRule:
    """Parse `GROUP=SCOPE` or `GROUP=SCOPE@TENANT`. Raises ValueError with an explanation."""
    value, equals, role = text.rpartition("=")
    scope, at, tenant = role.partition("@")
    if not (equals and value) or scope not in ROLES:
        raise ValueError(
            f"{text!r} is not a role: use GROUP=SCOPE or GROUP=SCOPE@TENANT, with SCOPE one of {', '.join(ROLES)}"
        )
    if scope.startswith("tenant:") != bool(at) or (at and not _SLUG.fullmatch(tenant)):
        raise ValueError(f"{text!r} is not a role: tenant:... needs @TENANT, platform:... takes none")
    return RoleRule(value, scope, tenant or None)


def is_trusted_url(url: str) -> bool:
    """True if keys and codes can be sent to the URL safely: over TLS, or to this machine."""
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
