"""Signing in with a key, and signing out."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from loramux.admin.console.browser_guard import CSRF_FIELD, is_from_elsewhere, is_token_right, local_path
from loramux.admin.console.console_site import Site
from loramux.admin.console.forms import read_form
from loramux.admin.console.oidc.role_confirmation import ConfirmInBrowser
from loramux.admin.console.rest_calls import RestError
from loramux.admin.console.sessions.content import SessionContent
from loramux.admin.console.sessions.cookies import LOGIN, SESSION, delete_cookie, read_cookie, set_cookie
from loramux.admin.console.sessions.rights import may_enter
from loramux.admin.console.sessions.sessions import LIFETIME_S
from loramux.admin.console.sign_in.oidc_login import OidcLogin
from loramux.admin.console.visit import Visit, console_url, find_session, frame, redirect
from loramux.migrations.database import DATABASE_TROUBLE
from loramux.platform.accounts.api_keys import key_sha256
from loramux.platform.accounts.principals import Principal
from loramux.platform.errors import ApiError

MAX_KEY = 500


class Login:
    """The login form. Its token is derived from a separate cookie, so it needs no session."""

    def __init__(self, site: Site, oidc: OidcLogin | None = None) -> None:
        self._site = site
        self._oidc = oidc

    async def show(self, request: Request) -> Response:
        try:
            if await find_session(self._site, request) is not None:
                return redirect(request, self._next(request, request.query_params.get("next", "")))
        except DATABASE_TROUBLE:
            return self._form(request, "The database cannot be reached: try again in a moment.", 503)
        except ConfirmInBrowser:
            return self._form(request)
        return self._form(request)

    async def sign_in(self, request: Request) -> Response:
        """Open a new session for a valid key, replacing any earlier session of the browser."""
        try:
            form = await read_form(request)
        except ApiError as error:
            return self._form(request, error.message, error.status)
        cookie = read_cookie(request, LOGIN) or ""
        if is_from_elsewhere(request) or not cookie or not is_token_right(form.text(CSRF_FIELD), _token(cookie)):
            return self._form(request, "The form has expired. Sign in again.", 403)
        address = request.client.host if request.client is not None else ""
        key = form.text("key")
        try:
            wait_s = await self._site.services.call(self._site.throttle.begin, address)
            if wait_s:
                refusal = self._form(request, f"Too many wrong keys from your address. Try again in {wait_s} s.", 429)
                refusal.headers["retry-after"] = str(wait_s)
                return refusal
            principal = None
            if 0 < len(key) <= MAX_KEY:
                principal = await self._site.services.call(self._site.services.accounts.api_keys.authenticate, key)
            if principal is None:
                return self._form(request, "This key is unknown, expired or revoked.", 401)
            if not may_enter(principal):
                return self._form(
                    request, "This key can only call models: use a key with a platform or tenant scope.", 403
                )
            token = await self._site.services.call(self._begin, address, principal, key, read_cookie(request, SESSION))
        except DATABASE_TROUBLE:
            return self._form(request, "The database cannot be reached: try again in a moment.", 503)
        response = redirect(request, self._next(request, form.text("next")))
        set_cookie(request, response, SESSION, token, LIFETIME_S)
        delete_cookie(request, response, LOGIN)
        return response

    def _begin(self, address: str, principal: Principal, key: str, old: str | None) -> str:
        """Replace the browser's old session and return the new session's token. Blocking."""
        self._site.throttle.forgive(address)
        if old is not None:
            self._site.sessions.close(old)
        return self._site.sessions.open(principal.key_id, SessionContent(key_sha256=key_sha256(key)))

    async def sign_out(self, visit: Visit) -> Response:
        """End the session and revoke the keys that its playground created."""
        for key in visit.session.playground_keys.values():
            # Ignore refusals. A session that has lost the right to revoke these keys no longer uses them, and they
            # expire within an hour.
            with suppress(RestError):
                await visit.rest.delete(f"/api_keys/{key.id}")
        token = read_cookie(visit.request, SESSION)
        if token is not None:
            await self._site.services.call(self._site.sessions.close, token)
        response: Response
        sign_on = visit.session.content.sign_on
        if self._oidc is not None and sign_on is not None:
            # Show a link instead of redirecting, because the console's CSP does not let forms redirect to other sites.
            sign_out_url = await self._oidc.sign_out_url(sign_on.id_token)
            values = {**frame(visit.request, None), "sign_out_url": sign_out_url}
            response = HTMLResponse(self._site.templates.render("signed_out.html", **values))
        else:
            response = redirect(visit.request, visit.url("/login"))
        delete_cookie(visit.request, response, SESSION)
        return response

    def _form(self, request: Request, error: str | None = None, status: int = 200) -> HTMLResponse:
        cookie = read_cookie(request, LOGIN) or secrets.token_urlsafe(32)
        wanted = request.query_params.get("next", "")
        html = self._site.templates.render(
            "login.html",
            **frame(request, None),
            error=error,
            token=_token(cookie),
            has_sign_on=self._oidc is not None,
            next=wanted if local_path(wanted) else "",
        )
        response = HTMLResponse(html, status)
        set_cookie(request, response, LOGIN, cookie)
        return response

    def _next(self, request: Request, wanted: str) -> str:
        # Stay under the console's path, so that a crafted link can lead only to the console.
        return console_url(request, "/") if local_path(wanted) is None else request.scope["root_path"] + wanted


def _token(cookie: str) -> str:
    # Derived from a secret cookie, so that any server can recompute the token.
    return hmac.new(cookie.encode("utf-8", "replace"), b"loramux login form", hashlib.sha256).hexdigest()
