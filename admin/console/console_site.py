"""Objects that the console's pages share. `rest` is the app whose `/admin/v1` routes the pages call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import ASGIApp

from loramux.admin.console.oidc.provider import OidcProvider
from loramux.admin.console.oidc.role_confirmation import OidcConfirmation
from loramux.admin.console.panels import Recent
from loramux.admin.console.rendering import Templates
from loramux.admin.console.sessions.login_throttle import LoginThrottle
from loramux.admin.console.sessions.rights import SessionRights
from loramux.admin.console.sessions.sessions import ConsoleSessions
from loramux.admin.rest.services import AdminServices


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    services: AdminServices
    rest: ASGIApp
    rights: SessionRights
    sessions: ConsoleSessions
    throttle: LoginThrottle
    templates: Templates
    now_s: Callable[[], float]
    """Returns the database's time, in seconds since 1970."""
    provider: OidcProvider | None = None
    confirmation: OidcConfirmation | None = None
    """Confirms roles from single sign-on, or None if it is not configured."""
    recent: Recent = field(default_factory=Recent)
    """A cache of expensive figures, which may be a few seconds old."""

    @classmethod
    def over(cls, services: AdminServices, rest: ASGIApp) -> Site:
        oidc, database = services.oidc, services.database

        def now_s() -> float:
            return database.now_us() / 1e6

        rights = SessionRights(
            services.accounts.api_keys, services.accounts.tenants, () if oidc is None else oidc.rules
        )
        sessions = ConsoleSessions(database, rights)
        provider = None if oidc is None else OidcProvider(oidc)
        confirmation = None
        if oidc is not None and provider is not None:
            confirmation = OidcConfirmation(services, sessions, rights, provider, oidc.roles_claim)
        return cls(
            services=services,
            rest=rest,
            rights=rights,
            sessions=sessions,
            throttle=LoginThrottle(database),
            templates=Templates(now_s),
            now_s=now_s,
            provider=provider,
            confirmation=confirmation,
        )
