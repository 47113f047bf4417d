"""Confirms the roles of single sign-on sessions by asking the provider again every few minutes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import structlog

from loramux.admin.console.oidc.provider import OidcProvider, ProviderUnavailable, SignInRefused
from loramux.admin.console.sessions.content import SignOn
from loramux.admin.console.sessions.rights import SessionRights, actor_of
from loramux.admin.console.sessions.sessions import ConsoleSessions, Session
from loramux.admin.rest.services import AdminServices

CONFIRMED_S = 300
"""Age at which a confirmation must be renewed, in seconds."""
ASK_EVERY_S = 30
"""Minimum time between attempts while the provider is not responding, in seconds."""
UNCONFIRMED_S = 900
"""Maximum age of a confirmation, in seconds. After that, the person must return to the provider."""

log = structlog.get_logger(__name__)


class ConfirmInBrowser(Exception):
    """The session's roles can be confirmed only by sending the browser back to the provider."""


class OidcConfirmation:
    """Keeps the roles of sessions up to date. One server at a time asks the provider. The others use its result."""

    def __init__(
        self,
        services: AdminServices,
        sessions: ConsoleSessions,
        rights: SessionRights,
        provider: OidcProvider,
        roles_claim: str,
    ) -> None:
        self._services = services
        self._sessions = sessions
        self._rights = rights
        self._provider = provider
        self._roles_claim = roles_claim

    async def confirmed(self, session: Session, token: str) -> Session | None:
        """Return the session with recently confirmed roles, or None if no role is left. Raises ConfirmInBrowser."""
        sign_on = session.content.sign_on
        if sign_on is None:
            return session
        now_us = self._services.database.now_us()
        due_us, retry_us = now_us - CONFIRMED_S * 1_000_000, now_us - ASK_EVERY_S * 1_000_000
        is_due = sign_on.confirmed_us <= due_us and sign_on.asked_us <= retry_us and not sign_on.needs_browser
        call = self._services.call
        if is_due and await call(self._sessions.claim_asking, session, due_us, retry_us, now_us):
            sign_on = await self._asked(sign_on, now_us)
            session.now_signed_on(sign_on)
            await call(self._sessions.keep, session)
            if not sign_on.needs_browser:
                return await call(self._sessions.find, token, is_use=False)
        age_s = (now_us - sign_on.confirmed_us) / 1_000_000
        # If the clock was set back, the age of the confirmation is unknown.
        if sign_on.needs_browser or not -ASK_EVERY_S <= age_s <= UNCONFIRMED_S:
            raise ConfirmInBrowser
        return session

    async def _asked(self, sign_on: SignOn, now_us: int) -> SignOn:
        """Ask the provider and return the sign-on: renewed, unchanged, or marked for confirmation in the browser."""
        asked = replace(sign_on, asked_us=now_us)
        actor = actor_of(sign_on.subject)
        try:
            again = await self._provider.ask_again(sign_on.access_token, sign_on.refresh_token, sign_on.subject)
        except ProviderUnavailable as error:
            log.warning("roles were not confirmed", actor=actor, error=str(error))
            return replace(asked, needs_browser=now_us - asked.confirmed_us > UNCONFIRMED_S * 1_000_000)
        except SignInRefused as error:
            log.info("roles must be confirmed in the browser", actor=actor, error=str(error))
            return replace(asked, needs_browser=True)
        asked = replace(asked, access_token=again.access_token, refresh_token=again.refresh_token)
        if self._roles_claim not in again.claims:
            return replace(asked, needs_browser=True)
        held = self._rights.known(values_of(again.claims[self._roles_claim]))
        return replace(asked, held=held, confirmed_us=now_us)


def values_of(claim: Any) -> frozenset[str]:
    """Return the names in a roles claim, which is a list of names or a single name."""
    if isinstance(claim, str):
        return frozenset({claim})
    return frozenset(one for one in claim if isinstance(one, str)) if isinstance(claim, list) else frozenset()
