"""What the pages of the console work with; made once, beside the admin app that they are part of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import ASGIApp

from loramux.admin.console.login_throttle import LoginThrottle
from loramux.admin.console.panels import Recent
from loramux.admin.console.rendering import Templates
from loramux.admin.console.sessions import ConsoleSessions
from loramux.admin.services import AdminServices
from loramux.platform.api_keys import ApiKeys
from loramux.platform.principals import Principal

CONSOLE_SCOPES = frozenset({"platform:admin", "platform:read", "tenant:admin", "tenant:develop", "tenant:read"})
"""A key needs one of them to sign in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The console. `rest` is the app whose `/admin/v1` the pages call."""

    services: AdminServices
    rest: ASGIApp
    sessions: ConsoleSessions = field(default_factory=ConsoleSessions)
    throttle: LoginThrottle = field(default_factory=LoginThrottle)
    templates: Templates = field(default_factory=Templates)
    recent: Recent = field(default_factory=Recent)
    """Figures that cost something and may be a few seconds old."""


def key_refresh(api_keys: ApiKeys, principal: Principal) -> Callable[[], Principal | None]:
    """How a session that was opened with a key learns what it may do now."""

    def refresh() -> Principal | None:
        current = api_keys.current(principal)
        return current if current is not None and may_enter(current) else None

    return refresh


def may_enter(principal: Principal) -> bool:
    return not principal.scopes.isdisjoint(CONSOLE_SCOPES)
