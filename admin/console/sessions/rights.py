"""What somebody who signed in may do now: read anew at each use, so that what was taken away is gone at once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from loramux.admin.console.sessions.content import SessionContent
from loramux.admin.server.oidc_settings import RoleRule
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.principals import Principal
from loramux.platform.accounts.tenants import Tenants

CONSOLE_SCOPES = frozenset({"platform:admin", "platform:read", "tenant:admin", "tenant:develop", "tenant:read"})
"""A key needs one of them to sign in."""
_PLATFORM_SCOPES = {
    "platform:admin": frozenset({"platform:admin", "platform:read"}),
    "platform:read": frozenset({"platform:read"}),
}


class SessionRights:
    """Of keys, as the database has them; of a single sign-on, by the rules of this process's settings. Blocking."""

    def __init__(self, api_keys: ApiKeys, tenants: Tenants, rules: Sequence[RoleRule] = ()) -> None:
        self._api_keys = api_keys
        self._tenants = tenants
        self._rules = tuple(rules)

    def principal(self, key_id: str, content: SessionContent) -> Principal | None:
        """Who a session acts as; None once it may do nothing."""
        if content.sign_on is not None:
            return self.of_person(content.sign_on.subject, content.sign_on.held)
        if content.key_sha256 is None:
            return None
        principal = self._api_keys.still_opens(key_id, content.key_sha256)
        return principal if principal is not None and may_enter(principal) else None

    def of_person(self, subject: str, values: Iterable[str]) -> Principal | None:
        """The first role that a person with these values has; None without one."""
        held = frozenset(values)
        for rule in self._rules:
            if rule.value in held and (principal := self._of_rule(rule, actor_of(subject))) is not None:
                return principal
        return None

    def known(self, values: Iterable[str]) -> tuple[str, ...]:
        """Those that a rule names, which are all that need be kept."""
        held = frozenset(values)
        return tuple(sorted({rule.value for rule in self._rules if rule.value in held}))

    def _of_rule(self, rule: RoleRule, actor: str) -> Principal | None:
        if rule.tenant is None:
            return Principal(key_id=actor, tenant_id=None, tenant_slug=None, scopes=_PLATFORM_SCOPES[rule.scope])
        tenant = self._tenants.get(rule.tenant)
        if tenant is None or tenant.slug != rule.tenant or tenant.state != "active":
            return None
        scopes = frozenset({rule.scope, "tenant:read"})
        return Principal(key_id=actor, tenant_id=tenant.id, tenant_slug=tenant.slug, scopes=scopes)


def may_enter(principal: Principal) -> bool:
    return not principal.scopes.isdisjoint(CONSOLE_SCOPES)


def actor_of(subject: str) -> str:
    """The name by which the audit log knows a person of the single sign-on."""
    return f"oidc_{hashlib.sha256(subject.encode('utf-8', 'replace')).hexdigest()[:24]}"
