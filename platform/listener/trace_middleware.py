"""Starts a trace for each request and ends it with the last byte of the response."""

from __future__ import annotations

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loramux.platform.telemetry.tracing import CURRENT, Tracing


class TraceMiddleware:
    """Traces calls to `paths`. Installed only if tracing is enabled."""

    def __init__(self, app: ASGIApp, tracing: Tracing, paths: frozenset[str]) -> None:
        self._app = app
        self._tracing = tracing
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths:
            await self._app(scope, receive, send)
            return
        # The path is one of a few known paths, but a client can send any method, so only POST becomes part of the name.
        name = f"POST {scope['path']}" if scope["method"] == "POST" else scope["path"]
        trace = self._tracing.begin(name, Headers(scope=scope))
        trace.root.set("loramux.request_id", scope["state"]["request_id"])
        failure: str | None = "exception"

        async def send_noted(message: Message) -> None:
            nonlocal failure
            if message["type"] == "http.response.start":
                status = message["status"]
                trace.root.set("http.response.status_code", status)
                failure = None if status < 500 else str(scope["state"].get("error_code", status))
            await send(message)

        token = CURRENT.set(trace)
        try:
            with structlog.contextvars.bound_contextvars(trace_id=trace.trace_id):
                await self._app(scope, receive, send_noted)
        finally:
            CURRENT.reset(token)
            trace.root.end(failure)
