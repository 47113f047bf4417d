"""Calls the generation endpoints directly, which avoids the overhead of FastAPI's routing and dependencies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

from fastapi import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from loramux.platform.accounts.principals import Principal
from loramux.platform.requests.authentication import authenticated, services_of
from loramux.platform.requests.error_responses import ErrorResponses
from loramux.platform.requests.services import GatewayServices

Handler: TypeAlias = Callable[[Request, Principal, GatewayServices], Awaitable[Response]]


class DirectRoutes:
    """Innermost middleware: for a POST to a path in `handlers`, authenticates the caller and calls the handler.

    The app also has a route for each handler. The route describes the endpoint in the OpenAPI document and answers
    other methods.
    """

    def __init__(self, app: ASGIApp, handlers: Mapping[str, Handler], errors: ErrorResponses) -> None:
        self._app = app
        self._handlers = handlers
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_direct = scope["type"] == "http" and scope["method"] == "POST"
        handler = self._handlers.get(scope["path"]) if is_direct else None
        if handler is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            services = await services_of(request)
            caller = await authenticated(request, services)
            response = await handler(request, caller, services)
        except Exception as error:
            response = await self._errors.answer(request, error)
        await response(scope, receive, send)
