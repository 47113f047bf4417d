"""Counts what the admin listener answers."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loramux.platform.telemetry.metrics import GatewayMetrics

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"})


class AdminMetered:
    """Counts calls by method and status, and times them to their last byte; Prometheus' own are left out."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == "/metrics":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        status = 500

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            # A method is whatever a client sends.
            method = scope["method"] if scope["method"] in METHODS else "other"
            self._metrics.admin_requests.labels(method, str(status)).inc()
            self._metrics.admin_request_seconds.observe(time.monotonic() - started_s)
