"""Signing in through an OpenID provider: the redirect to the provider, the callback, and signing out."""

from __future__ import annotations

import hmac

import structlog
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from loramux.admin.console.browser_guard import local_path
from loramux.admin.console.console_site import Site
from loramux.admin.console.oidc.attempt import ATTEMPT_S, CLOCKS_APART_S, OidcAttempt, name_of
from loramux.admin.console.oidc.provider import Identity, OidcProvider, ProviderUnavailable, SignInRefused
from loramux.admin.console.oidc.role_confirmation import values_of
from loramux.admin.console.sessions.content import SessionContent, SignOn
from loramux.admin.console.sessions.cookies import OIDC, SESSION, delete_cookie, read_cookie, read_cookies, set_cookie
from loramux.admin.console.sessions.rights import actor_of
from loramux.admin.console.sessions.sessions import LIFETIME_S
from loramux.admin.console.visit import console_url, frame
from loramux.admin.server.oidc_settings import OidcSettings
from loramux.migrations.database import DATABASE_TROUBLE

MAX_UNDER_WAY = 4
"""Maximum number of concurrent sign-ins per browser, one per tab. When another one begins, the oldest is discarded."""

log = structlog.get_logger(__name__)


class OidcLogin:
    """The routes of single sign-on. The browser keeps a sign-in's state, so that any server can finish it."""

    def __init__(self, site: Site, settings: OidcSettings, provider: OidcProvider) -> None:
        self._site = site
        self._settings = settings
        self._provider = provider

    async def begin(self, request: Request) -> Response:
        wanted = local_path(request.query_params.get("next", "")) or "/"
        under_way = OidcAttempt.begin(self._site.services.database.now_us() // 1_000_000, wanted)
        try:
            url = await self._provider.authorization_url(under_way.told(self._back_to(request)))
        except ProviderUnavailable as error:
            return self._refusal(request, error, "The sign-on service cannot be reached: try again in a moment.", 503)
        response = RedirectResponse(url, 303)
        for surplus in _surplus(request):
            delete_cookie(request, response, surplus)
        set_cookie(request, response, OIDC + under_way.name, under_way.cookie, ATTEMPT_S)
        return response

    async def finish(self, request: Request) -> Response:
        """Handle the browser's return from the provider, with a code or an error."""
        query = request.query_params
        state = query.get("state", "")
        under_way = OidcAttempt.read(read_cookie(request, OIDC + name_of(state)))
        attempt = None if under_way is None else under_way.told(self._back_to(request))
        if (
            under_way is None
            or attempt is None
            or not hmac.compare_digest(state.encode("utf-8", "replace"), attempt.state.encode())
        ):
            return self._refusal(request, None, "This sign-in has expired or is not yours. Start again.", 403)
        took_s = self._site.services.database.now_us() // 1_000_000 - under_way.begun_s
        if not -CLOCKS_APART_S <= took_s <= ATTEMPT_S:
            return self._refusal(request, None, "This sign-in took too long. Start again.", 403, under_way)
        if "code" not in query:
            return self._refusal(request, None, "The sign-on service did not sign you in.", 403, under_way)
        try:
            identity = await self._provider.redeem(attempt, query["code"], query.get("iss"))
            token = await self._site.services.call(self._open, identity, read_cookie(request, SESSION))
        except ProviderUnavailable as error:
            told = "The sign-on service cannot be reached: try again in a moment."
            return self._refusal(request, error, told, 503, under_way)
        except SignInRefused as error:
            return self._refusal(request, error, "The sign-on service's answer cannot be trusted.", 403, under_way)
        except DATABASE_TROUBLE as error:
            told = "The database cannot be reached: try again in a moment."
            return self._refusal(request, error, told, 503, under_way)
        if token is None:
            told = "The sign-on service knows you, but you have no role here."
            return self._refusal(request, None, told, 403, under_way)
        subject = str(identity.claims["sub"])
        # The audit log identifies the person only by this actor.
        log.info("signed in", actor=actor_of(subject), subject=subject[:200])
        response = RedirectResponse(request.scope["root_path"] + under_way.wanted, 303)
        set_cookie(request, response, SESSION, token, LIFETIME_S)
        delete_cookie(request, response, OIDC + under_way.name)
        return response

    async def sign_out_url(self, id_token: str) -> str | None:
        """Return the provider's sign-out URL, or None if the provider has none or cannot be reached."""
        try:
            return await self._provider.sign_out_url(id_token)
        except ProviderUnavailable:
            return None

    def _open(self, identity: Identity, old: str | None) -> str | None:
        """Replace the browser's session and return the new token, or None for a person without a role. Blocking."""
        subject = str(identity.claims["sub"])
        held = values_of(identity.claims.get(self._settings.roles_claim))
        if self._site.rights.of_person(subject, held) is None:
            return None
        if old is not None:
            self._site.sessions.close(old)
        now_us = self._site.services.database.now_us()
        sign_on = SignOn(
            subject=subject,
            held=self._site.rights.known(held),
            confirmed_us=now_us,
            asked_us=now_us,
            id_token=identity.id_token,
            access_token=identity.access_token,
            refresh_token=identity.refresh_token,
        )
        return self._site.sessions.open(actor_of(subject), SessionContent(sign_on=sign_on))

    def _back_to(self, request: Request) -> str:
        here = f"{request.url.scheme}://{request.headers.get('host', '')}{console_url(request, '/oidc/callback')}"
        return self._settings.redirect_url or here

    def _refusal(
        self, request: Request, error: Exception | None, message: str, status: int, over: OidcAttempt | None = None
    ) -> HTMLResponse:
        log.warning("sign-in refused", status=status, error=None if error is None else str(error))
        html = self._site.templates.render("oidc_problem.html", **frame(request, None), error=message)
        response = HTMLResponse(html, status)
        if over is not None:
            delete_cookie(request, response, OIDC + over.name)
        return response


def _surplus(request: Request) -> list[str]:
    """Return the cookies to delete before another sign-in begins: malformed ones and, over the limit, the oldest."""
    attempts = {name: OidcAttempt.read(value) for name, value in read_cookies(request, OIDC).items()}
    begun_s = {name: attempt.begun_s for name, attempt in attempts.items() if attempt is not None}
    kept = sorted(begun_s, key=lambda name: begun_s[name], reverse=True)[: MAX_UNDER_WAY - 1]
    return [name for name in attempts if name not in kept]
