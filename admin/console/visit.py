"""Handles a signed-in request: renders a page, or performs an action and redirects.

`Visit.rest` calls the admin routes as the session's principal.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import structlog
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from loramux.admin.console.browser_guard import (
    CSRF_FIELD,
    CSRF_HEADER,
    is_from_elsewhere,
    is_token_right,
    local_path,
)
from loramux.admin.console.console_site import Site
from loramux.admin.console.forms import MAX_FORM_BYTES, Form, read_form
from loramux.admin.console.oidc.role_confirmation import ConfirmInBrowser
from loramux.admin.console.rest_calls import Document, RestCalls, RestError
from loramux.admin.console.sessions.cookies import SESSION, read_cookie, read_theme
from loramux.admin.console.sessions.sessions import Session
from loramux.migrations.database import DATABASE_TROUBLE
from loramux.platform.errors import ApiError, Conflict

RETRY_S = 5

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Visit:
    request: Request
    site: Site
    session: Session
    form: Form

    @property
    def rest(self) -> RestCalls:
        return RestCalls(self.site.rest, self.session.principal, self.request.scope, self.site.now_s)

    @property
    def is_platform(self) -> bool:
        return self.session.principal.tenant_id is None

    @property
    def sees(self) -> tuple[Any, ...]:
        """A cache key shared by all visitors who see the same data."""
        principal = self.session.principal
        return (principal.tenant_id, principal.scopes, principal.adapter_ids)

    @property
    def may_change(self) -> bool:
        """True if the session may make changes. The routes enforce this rule. The console only hides actions."""
        return not self.session.principal.scopes.isdisjoint({"platform:admin", "tenant:admin"})

    @property
    def may_develop(self) -> bool:
        """True if the session may at least create adapters and upload versions."""
        return self.may_change or "tenant:develop" in self.session.principal.scopes

    @property
    def is_platform_admin(self) -> bool:
        return self.session.principal.is_platform_admin

    @property
    def is_partial(self) -> bool:
        """True if htmx requests a part of a page."""
        return is_htmx(self.request)

    def query(self, name: str) -> str | None:
        value = self.request.query_params.get(name, "").strip()
        return value[:200] or None

    def param(self, name: str) -> str:
        return str(self.request.path_params[name])

    def once(self) -> str:
        """A value for a hidden field `once`, by which a form that is sent twice is recognized."""
        return secrets.token_urlsafe(16)

    async def post_once(self, path: str, body: Mapping[str, Any]) -> Document:
        """Make a call that creates something, unless the same form was sent before, for example by a double click.

        Then return the first response, whose `secret` is None. Raises RestError.
        """
        try:
            return await self.rest.post(path, body, once=self.form.text("once"))
        except RestError as error:
            if error.code not in ("idempotency_key_in_use", "idempotency_key_reused"):
                raise
            raise Conflict("this form was already sent: reload the page in a moment to see the result") from None

    def url(self, path: str, **params: Any) -> str:
        return console_url(self.request, path, **params)

    def frame(self) -> dict[str, Any]:
        return frame(self.request, self)

    def page(self, template: str, /, status: int = 200, **values: Any) -> HTMLResponse:
        html = self.site.templates.render(template, **frame(self.request, self), **values)
        return HTMLResponse(html, status)

    def go(self, path: str, **params: Any) -> Response:
        return redirect(self.request, self.url(path, **params))

    def done(self, text: str, path: str | None = None, undo_url: str = "") -> Response:
        """Report success on the next page, which by default is the page with the form."""
        self.session.say("done", text, undo_url=undo_url)
        return self.go(path) if path is not None else self.back()

    def back(self) -> Response:
        referrer = urlsplit(self.request.headers.get("referer", ""))
        root = self.request.scope["root_path"]
        path = local_path(referrer.path) or ""
        if referrer.netloc != self.request.headers.get("host") or not path.startswith(f"{root}/"):
            return self.go("/")
        return redirect(self.request, path + (f"?{referrer.query}" if referrer.query else ""))


Handler = Callable[[Visit], Awaitable[Response]]
ConsoleEndpoint = Callable[[Request], Awaitable[Response]]


def console_url(request: Request, path: str, **params: Any) -> str:
    query = urlencode({name: value for name, value in params.items() if value is not None}, doseq=True)
    return quote(request.scope["root_path"] + path, safe="/@:~") + (f"?{query}" if query else "")


def is_htmx(request: Request) -> bool:
    return request.headers.get("hx-request") == "true"


def redirect(request: Request, url: str) -> Response:
    if is_htmx(request):
        return Response(status_code=200, headers={"hx-redirect": url})
    return RedirectResponse(url, 303)


def frame(request: Request, visit: Visit | None) -> dict[str, Any]:
    theme = read_theme(request)

    def url(path: str, **params: Any) -> str:
        return console_url(request, path, **params)

    return {
        "url": url,
        "visit": visit,
        "path": request.scope["path"].removeprefix(request.scope["root_path"]),
        "theme": theme if theme in ("light", "dark") else "auto",
        # Only full pages call this, because a live part of a page must not consume the notices.
        "take_notices": visit.session.take_notices if visit is not None else list,
    }


def page(site: Site, handler: Handler) -> ConsoleEndpoint:
    @wraps(handler)
    async def endpoint(request: Request) -> Response:
        visit: Visit | None = None
        try:
            session = await find_session(site, request)
            if session is None:
                return _to_login(request)
            visit = Visit(request, site, session, Form(()))
            async with (
                nullcontext() if visit.is_platform else site.services.slots.pages.held_slot(session.principal.holder)
            ):
                return await _kept(visit, await handler(visit))
        except ConfirmInBrowser:
            if request.headers.get("sec-fetch-mode", "navigate") != "navigate" and not is_htmx(request):
                # A script cannot follow a redirect to the provider. The redirect would only use up one of the browser's
                # sign-in attempts.
                return _json_refusal(401, "your sign-in must be confirmed: reload this page")
            return _to_provider(request)
        except (RestError, ApiError) as error:
            return problem(site, request, visit, error.status, error.message)
        except DATABASE_TROUBLE as error:
            log.warning("page refused", error=repr(error))
            return problem(site, request, visit, 503, "the database cannot be reached")
        except Exception:
            log.exception("page failed", path=request.scope["path"])
            return problem(site, request, visit, 500, "an internal error occurred; see the server's log")

    return endpoint


def action(
    site: Site, handler: Handler, *, reads_form: bool = True, max_form_bytes: int = MAX_FORM_BYTES
) -> ConsoleEndpoint:
    """Return an endpoint that makes a change.

    It requires the session's token and reports errors on the originating page. If `reads_form` is False, a script makes
    the call: the token is in a header, the handler reads the body, and errors are JSON.
    """

    @wraps(handler)
    async def endpoint(request: Request) -> Response:
        visit: Visit | None = None

        def refusal(status: int, message: str) -> Response:
            return problem(site, request, visit, status, message) if reads_form else _json_refusal(status, message)

        try:
            session = await find_session(site, request)
            if session is None:
                return _to_login(request) if reads_form else _json_refusal(401, "your session has ended: sign in again")
            visit = Visit(request, site, session, Form(()))
            if reads_form:
                visit = replace(visit, form=await read_form(request, max_form_bytes))
            presented = request.headers.get(CSRF_HEADER) or visit.form.text(CSRF_FIELD)
            if is_from_elsewhere(request) or not is_token_right(presented, session.csrf):
                return refusal(403, "this form is not from your session: reload the page and try again")
            return await _kept(visit, await handler(visit))
        except ConfirmInBrowser:
            told = "your sign-in must be confirmed: reload this page"
            return _to_provider(request) if reads_form else _json_refusal(401, told)
        except (RestError, ApiError) as error:
            message = refusal_text(error)
            if not reads_form or visit is None or visit.is_partial:
                return refusal(error.status, message)
            return await _refused(visit, message)
        except DATABASE_TROUBLE as error:
            log.warning("action refused", error=repr(error))
            return refusal(503, "the database cannot be reached; nothing was changed")
        except Exception:
            log.exception("action failed", path=request.scope["path"])
            return refusal(500, "an internal error occurred; see the server's log")

    return endpoint


async def find_session(site: Site, request: Request, *, is_use: bool = True) -> Session | None:
    """Return the session of a request with its current rights. Raises ConfirmInBrowser or a database error."""
    token = read_cookie(request, SESSION)
    if not token:
        return None
    session = await site.services.call(site.sessions.find, token, is_use=is_use)
    if session is None or site.confirmation is None:
        return session
    return await site.confirmation.confirmed(session, token)


def problem(site: Site, request: Request, visit: Visit | None, status: int, message: str) -> Response:
    """Return a page, or a notice for htmx, that shows `message`.

    After a GET with status 503, the browser reloads the page.
    """
    template = "problem_notice.html" if is_htmx(request) else "problem.html"
    html = site.templates.render(template, **frame(request, visit), status=status, message=message)
    headers = {}
    if status == 503 and request.method == "GET":
        headers["refresh"] = str(RETRY_S)
    if template == "problem_notice.html":
        headers["hx-retarget"] = "#notices"
        headers["hx-reswap"] = "innerHTML"
    return HTMLResponse(html, status, headers)


async def _kept(visit: Visit, response: Response) -> Response:
    """Save the request's changes to its session, then return the response."""
    try:
        await visit.site.services.call(visit.site.sessions.keep, visit.session)
    except DATABASE_TROUBLE as error:
        log.warning("could not save a session", error=repr(error))
        if visit.request.method != "GET":
            told = "the change was made, but then the database failed: check the result before you repeat it"
            return problem(visit.site, visit.request, None, 503, told)
    return response


async def _refused(visit: Visit, message: str) -> Response:
    visit.session.say("error", message)
    return await _kept(visit, visit.back())


def refusal_text(error: RestError | ApiError) -> str:
    """Return a refusal's message, with the time to wait if a rate limit was exceeded."""
    if error.status != 429 or error.retry_after_s is None:
        return error.message
    return f"{error.message}: try again in {math.ceil(error.retry_after_s)} s"


def _json_refusal(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status)


def _to_provider(request: Request) -> Response:
    root = request.scope["root_path"]
    address = urlsplit(str(request.url) if request.method == "GET" else request.headers.get("referer", ""))
    path = address.path.removeprefix(root) or "/"
    wanted = local_path(path + (f"?{address.query}" if address.query else ""))
    return redirect(request, console_url(request, "/oidc/login", next=wanted))


def _to_login(request: Request) -> Response:
    path = request.scope["path"].removeprefix(request.scope["root_path"]) or "/"
    if request.method != "GET":
        path = "/"
    elif request.url.query:
        path = f"{path}?{request.url.query}"
    return redirect(request, console_url(request, "/login", next=None if path == "/" else path))


class Forwarded(Response):
    """Lets a REST route read the browser's request body and stream its response directly.

    `params` are by default those of the browser's request.
    """

    def __init__(self, visit: Visit, method: str, path: str, params: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._rest = visit.rest
        self._request = visit.request
        self._method = method
        self._path = path
        self._params = visit.request.query_params if params is None else params

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name in (b"content-type", b"content-length")]
        await self._rest.forward(self._method, self._path, headers, self._request.receive, send, dict(self._params))
