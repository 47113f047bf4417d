"""Signing in through an OpenID provider: to the provider, back from it, and out again."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from loramux.admin.console.browser_guard import local_path
from loramux.admin.console.console_site import Site
from loramux.admin.console.oidc_provider import Attempt, Identity, OidcProvider, ProviderUnavailable, SignInRefused
from loramux.admin.console.oidc_settings import OidcSettings, RoleRule
from loramux.admin.console.session_cookie import OIDC, SESSION, delete_cookie, read_cookie, set_cookie
from loramux.admin.console.sessions import LIFETIME_S
from loramux.admin.console.visit import DATABASE_TROUBLE, console_url, frame
from loramux.platform.principals import Principal

ATTEMPT_S = 600.0
MAX_ATTEMPTS = 10_000
_PLATFORM_SCOPES = {
    "platform:admin": frozenset({"platform:admin", "platform:read"}),
    "platform:read": frozenset({"platform:read"}),
}

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Pending:
    attempt: Attempt
    browser: bytes
    """SHA-256 of the cookie of the browser that began it; a code that is slipped to another browser opens nothing."""
    wanted: str
    begun_s: float


class OidcLogin:
    """The routes of single sign-on. A sign-in under way is known here by its `state`, once."""

    def __init__(self, site: Site, settings: OidcSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._site = site
        self._settings = settings
        self._provider = OidcProvider(settings, clock)
        self._clock = clock
        self._pending: OrderedDict[str, _Pending] = OrderedDict()

    async def begin(self, request: Request) -> Response:
        """Send the browser to the provider."""
        attempt = Attempt(
            state=secrets.token_urlsafe(32),
            nonce=secrets.token_urlsafe(32),
            code_verifier=secrets.token_urlsafe(48),
            redirect_url=self._settings.redirect_url or _here(request),
        )
        try:
            url = await self._provider.authorization_url(attempt)
        except ProviderUnavailable as error:
            return self._refusal(request, error, "The sign-on service cannot be reached: try again in a moment.", 503)
        cookie = secrets.token_urlsafe(32)
        wanted = local_path(request.query_params.get("next", "")) or "/"
        self._pending[attempt.state] = _Pending(attempt, _sha256(cookie), wanted, self._clock())
        while len(self._pending) > MAX_ATTEMPTS:
            self._pending.popitem(last=False)
        response = RedirectResponse(url, 303)
        set_cookie(request, response, OIDC, cookie, int(ATTEMPT_S))
        return response

    async def finish(self, request: Request) -> Response:
        """The browser is back from the provider, with a code or with nothing good."""
        query = request.query_params
        pending = self._pending.pop(query.get("state", ""), None)
        cookie = read_cookie(request, OIDC) or ""
        is_its_own = pending is not None and hmac.compare_digest(_sha256(cookie), pending.browser)
        if pending is None or not is_its_own or self._clock() - pending.begun_s > ATTEMPT_S:
            return self._refusal(request, None, "This sign-in had expired or is not yours. Begin again.", 403)
        if "code" not in query:
            return self._refusal(request, None, "The sign-on service did not sign you in.", 403)
        try:
            identity = await self._provider.redeem(pending.attempt, query["code"], query.get("iss"))
            principal = await self._site.services.call(self._principal, identity)
        except ProviderUnavailable as error:
            return self._refusal(request, error, "The sign-on service cannot be reached: try again in a moment.", 503)
        except SignInRefused as error:
            return self._refusal(request, error, "The sign-on service's answer is not to be trusted.", 403)
        except DATABASE_TROUBLE as error:
            return self._refusal(request, error, "The database cannot be reached: try again in a moment.", 503)
        if principal is None:
            return self._refusal(request, None, "You are known to the sign-on service, but have no role here.", 403)
        if (old := read_cookie(request, SESSION)) is not None:
            self._site.sessions.close(old)
        token, session = self._site.sessions.open(principal, lambda: self._current(principal))
        session.id_token = identity.id_token
        # The audit log knows who acts by this name alone.
        log.info("signed in", actor=principal.key_id, subject=str(identity.claims["sub"])[:200])
        response = RedirectResponse(request.scope["root_path"] + pending.wanted, 303)
        set_cookie(request, response, SESSION, token, int(LIFETIME_S))
        delete_cookie(request, response, OIDC)
        return response

    async def sign_out_url(self, id_token: str) -> str | None:
        """Where the provider's own session is ended; None where there is no such place or no provider."""
        try:
            return await self._provider.sign_out_url(id_token)
        except ProviderUnavailable:
            return None

    def _principal(self, identity: Identity) -> Principal | None:
        """The first role that the person has; None without one. Blocking."""
        held = _values(identity.claims.get(self._settings.roles_claim))
        actor = f"oidc_{hashlib.sha256(str(identity.claims['sub']).encode()).hexdigest()[:24]}"
        for rule in self._settings.rules:
            if rule.value in held and (principal := self._of_rule(rule, actor)) is not None:
                return principal
        return None

    def _of_rule(self, rule: RoleRule, actor: str) -> Principal | None:
        if rule.tenant is None:
            return Principal(key_id=actor, tenant_id=None, tenant_slug=None, scopes=_PLATFORM_SCOPES[rule.scope])
        tenant = self._site.services.tenants.get(rule.tenant)
        if tenant is None or tenant.slug != rule.tenant or tenant.state != "active":
            return None
        scopes = frozenset({rule.scope, "tenant:read"})
        return Principal(key_id=actor, tenant_id=tenant.id, tenant_slug=tenant.slug, scopes=scopes)

    def _current(self, principal: Principal) -> Principal | None:
        """The role is the sign-in's for as long as the session lasts; its tenant may go out of service meanwhile."""
        if principal.tenant_id is None:
            return principal
        tenant = self._site.services.tenants.get(principal.tenant_id)
        return principal if tenant is not None and tenant.state == "active" else None

    def _refusal(self, request: Request, error: Exception | None, message: str, status: int) -> HTMLResponse:
        log.warning("sign-in refused", status=status, error=None if error is None else str(error))
        html = self._site.templates.render("oidc_problem.html", **frame(request, None), error=message)
        response = HTMLResponse(html, status)
        delete_cookie(request, response, OIDC)
        return response


def _here(request: Request) -> str:
    """Our own address as the browser sees it. A forged host gains nothing: the provider knows where it may answer."""
    return f"{request.url.scheme}://{request.headers.get('host', '')}{console_url(request, '/oidc/callback')}"


def _values(claim: Any) -> frozenset[str]:
    """A claim of roles is a list of names, or one name."""
    if isinstance(claim, str):
        return frozenset({claim})
    return frozenset(one for one in claim if isinstance(one, str)) if isinstance(claim, list) else frozenset()


def _sha256(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
