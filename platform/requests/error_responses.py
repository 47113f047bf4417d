"""The only place that turns exceptions into responses. It also gives every response its `x-request-id`."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loramux.migrations.database import ReadTooLong
from loramux.migrations.identifiers import new_id
from loramux.platform.admission.database_health import DatabaseTrouble
from loramux.platform.admission.group_commit import CommitterClosed
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.errors import ApiError, InvalidRequest, MethodNotAllowed, NotFound, Unavailable

ENGINE_RETRY_S = 5.0
DATABASE_RETRY_S = 5.0
DISK_RETRY_S = 30.0

REMOVED_ROOT = "loramux.removed_root"
"""Key in a scope of the prefix that was removed from the path. Starlette's own `root_path` would be removed twice."""

Translation = Callable[[Exception], ApiError]
log = structlog.get_logger()


def engine_unavailable(_: Exception | None = None) -> ApiError:
    return Unavailable("the engine is restarting; try again", code="engine_unavailable", retry_after_s=ENGINE_RETRY_S)


def quota_unavailable(_: Exception | None = None) -> ApiError:
    return Unavailable(
        "the database cannot be used now; try again", code="quota_unavailable", retry_after_s=DATABASE_RETRY_S
    )


def _read_too_long(_: Exception) -> ApiError:
    return Unavailable(
        "the database took too long: ask for a shorter range or fewer rows, or try again later",
        code="read_timeout",
        retry_after_s=DATABASE_RETRY_S,
    )


def _disk_full(error: Exception) -> ApiError:
    """Raises any error that is not about a full disk or quota of a file system."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Unavailable("the server's disk is full", code="disk_full", retry_after_s=DISK_RETRY_S)
    raise error


TRANSLATIONS: Mapping[type[Exception], Translation] = {
    EngineUnavailable: engine_unavailable,
    OperationalError: quota_unavailable,
    InterfaceError: quota_unavailable,
    PoolTimeout: quota_unavailable,
    DatabaseTrouble: quota_unavailable,
    CommitterClosed: quota_unavailable,
    ReadTooLong: _read_too_long,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorForm:
    """How a surface writes errors, and the header in which its clients look for the ID of a request."""

    body: Callable[[ApiError, str], Any]
    """Returns the body for an error and the ID of the request."""
    status: Callable[[ApiError], int] = lambda error: error.status
    id_header: str = "x-request-id"
    add_headers: Callable[[MutableHeaders], None] = lambda _: None
    """Adds headers that the surface's clients read to those of any response, not only of an error."""


OPENAI_ERRORS = ErrorForm(body=lambda error, _: error.envelope())

FormOf = Callable[[Scope], ErrorForm]
"""Returns the form of the errors of a request."""


class ErrorResponses:
    """Turns exceptions into responses. `translations` maps further exception types to functions that turn them and
    their subclasses into ApiErrors. `elsewhere` maps the starts of paths of the other listener to the end of a sentence
    that says where to send the call.
    """

    def __init__(
        self,
        translations: Mapping[type[Exception], Translation] | None = None,
        form_of: FormOf = lambda _: OPENAI_ERRORS,
        elsewhere: Mapping[str, str] | None = None,
    ) -> None:
        # Only for responses: evals and batches, which also use TRANSLATIONS, treat other errors of files differently.
        self._known = {**TRANSLATIONS, OSError: _disk_full, **(translations or {})}
        self.form_of = form_of
        self._elsewhere = elsewhere or {}

    @property
    def kinds(self) -> tuple[type[Exception], ...]:
        """The exceptions that `answer` turns into a response. `answer` re-raises any other exception."""
        return (ApiError, HTTPException, RequestValidationError, *self._known)

    async def answer(self, request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 405:
            error.headers = {"Allow": ", ".join(_methods_at(request))}
        if isinstance(error, HTTPException) and error.status_code == 404:
            told: ApiError = NotFound(_nothing_there(request, self._elsewhere))
        else:
            told = error if isinstance(error, ApiError) else _translated(error, self._known)
        request.state.error_code = told.code
        # A frame of the traceback may refer to the error. Without the cycle, the request's memory is freed at once.
        error.__traceback__ = None
        return error_response(told, self.form_of(request.scope), request_id_of(request))


def install_error_handling(app: FastAPI, errors: ErrorResponses | None = None) -> None:
    """Make an app return every error as an error envelope and add `x-request-id` to every response."""
    errors = errors or ErrorResponses()
    for kind in errors.kinds:
        app.add_exception_handler(kind, errors.answer)
    app.add_middleware(RequestIds, form_of=errors.form_of)


def error_response(error: ApiError, form: ErrorForm = OPENAI_ERRORS, request_id: str = "") -> Response:
    return json_response(form.body(error, request_id), form.status(error), error.response_headers())


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")


def request_id_of(request: Request) -> str:
    """Return the identifier that the response, the logs and the ledger give the request."""
    return str(request.state.request_id)


class RequestIds:
    """Middleware around the whole app: gives each request its ID, and turns uncaught exceptions into a 500 response.

    It also removes the server's own scheme and host from redirects. A proxy may not report the scheme of its clients,
    and a redirect from https to http would send their keys unencrypted.
    """

    def __init__(self, app: ASGIApp, form_of: FormOf = lambda _: OPENAI_ERRORS) -> None:
        self._app = app
        self._form_of = form_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Never use an ID that the client chose, because it could collide with another one in the ledger.
        request_id = new_id("req")
        scope.setdefault("state", {})["request_id"] = request_id
        form = self._form_of(scope)
        has_started = False

        async def send_named(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                headers = MutableHeaders(scope=message)
                # The ID of the request that answered: see `serve_received`.
                headers["x-request-id"] = headers[form.id_header] = scope["state"]["request_id"]
                form.add_headers(headers)
                if message["status"] == 307:
                    headers["location"] = _relative(headers["location"], Request(scope))
            await send(message)

        # Every log line written for this request carries its id.
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self._app(scope, receive, send_named)
            except Exception:
                log.exception("request failed", path=scope["path"])
                if has_started:
                    raise
                failure = error_response(ApiError("internal error; see the server's log"), form, request_id)
                await failure(scope, receive, send_named)


def _relative(location: str, request: Request) -> str:
    """Return the path of a redirect to this server, or another redirect unchanged."""
    origin = f"{request.url.scheme}://{request.url.netloc}"
    path = location.removeprefix(origin)
    # A browser reads `//host` as another server.
    return path if path.startswith("/") and not path.startswith("//") else location


def _methods_at(request: Request) -> list[str]:
    """The methods of all routes at the request's path. The router's own error names only those of the first route."""
    routes = request.app.routes

    def has_route(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in routes)

    return [method for method in ("DELETE", "GET", "HEAD", "PATCH", "POST", "PUT") if has_route(method)]


def _nothing_there(request: Request, elsewhere: Mapping[str, str]) -> str:
    """Return the message for an unknown path. It names the path that a client with a wrong base URL means: its own path
    with `/v1` before it, or the part after its first `v1`, with or without `/v1` before it. For a path of the other
    listener, it names that listener.
    """
    root = request.scope.get(REMOVED_ROOT, "")
    path = "/".join(segment for segment in request.scope["path"].split("/") if segment)
    # The segments after `v1` are not the client's base URL. Without one of them, the path would name another resource.
    end = f"/{path}".partition("/v1/")[2]
    for meant in (f"/v1/{path}", f"/v1/{end}", f"/{end}"):
        scope = {**request.scope, "path": meant}
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes):
            told = f"{root}{meant}"[:200]
            return f"there is nothing at this path: correct the client's base URL, so that it calls {told}"
    for start, where in elsewhere.items():
        if f"/{path}/".startswith(start):
            return f"there is nothing at this path: {where}"
    return "there is nothing at this path"


def _translated(error: Exception, known: Mapping[type[Exception], Translation]) -> ApiError:
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return InvalidRequest(str(first["msg"]), param=".".join(str(part) for part in first["loc"][1:]) or None)
    if isinstance(error, HTTPException):
        return _of_status(error)
    for kind in type(error).__mro__:
        if kind in known:
            told = known[kind](error)
            log.warning("request refused", error=repr(error))
            return told
    raise error


def _of_status(error: HTTPException) -> ApiError:
    if error.status_code == 405:
        return MethodNotAllowed("this path does not support the method", headers=error.headers)
    if error.status_code < 500:
        return InvalidRequest(str(error.detail))
    return ApiError(str(error.detail))
