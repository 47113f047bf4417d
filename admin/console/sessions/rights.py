"""The current rights of a session, read on each use, so that revocations take effect immediately."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from loramux.admin.console.sessions.content import SessionContent
from loramux.admin.server.oidc_settings import RoleRule
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.principals import Principal
from loramux.platform.accounts.tenants import Tenants

CONSOLE_SCOPES = frozenset({"platform:admin", "platform:read", "tenant:admin", "tenant:develop", "tenant:read"})
"""A key needs one of these scopes to sign in."""
_PLATFORM_SCOPES = {
    "platform:admin": frozenset({"platform:admin", "platform:read"}),
    "platform:read": frozenset({"platform:read"}),
}


class SessionRights:
    """Finds a session's rights: in the database for a key, in this process's settings for single sign-on. Blocking."""

    def __init__(self, api_keys: ApiKeys, tenants: Tenants, rules: Sequence[RoleRule] = ()) -> None:
        self._api_keys = api_keys
        self._tenants = tenants
        self._rules = tuple(rules)

    def principal(self, key_id: str, content: SessionContent) -> Principal | None:
        """The principal that a session acts as, or None if the session no longer has any rights."""
        if content.sign_on is not None:
            return self.of_person(content.sign_on.subject, content.sign_on.held)
        if content.key_sha256 is None:
            return None
        principal = self._api_keys.reauthenticate(key_id, content.key_sha256)
        return principal if principal is not None and may_enter(principal) else None

    def of_person(self, subject: str, values: Iterable[str]) -> Principal | None:
        """The principal for the first role rule that matches these values and whose tenant, if any, is active.

        None if there is no such rule.
        """
        held = frozenset(values)
        for rule in self._rules:
            if rule.value in held and (principal := self._of_rule(rule, actor_of(subject))) is not None:
                return principal
        return None

    def known(self, values: Iterable[str]) -> tuple[str, ...]:
        """Return the values that appear in a role rule. Other values need not be stored."""
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
    return f"oidc_{hashlib.sha256(subject.encode('utf-8', 'replace')).hexdigest()[:24]}"
