"""The OpenAI listener."""

from __future__ import annotations

import time
from importlib.metadata import version

import structlog
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loramux.platform.openai_api import chat, completions, models
from loramux.platform.openai_api import openapi_route as document
from loramux.platform.openai_api.error_responses import install_error_handling
from loramux.platform.openai_api.health import health_router
from loramux.platform.openai_api.services import GatewayServices
from loramux.platform.openai_api.trace_middleware import TracedRequests
from loramux.platform.telemetry.metrics import GatewayMetrics

log = structlog.get_logger()

ENDPOINTS = {"/v1/completions": "completions", "/v1/chat/completions": "chat", "/v1/models": "models"}


def create_openai_app(services: GatewayServices) -> FastAPI:
    """The app; `services.running.maintain()` must run beside it."""
    # Nothing is public but health, the documentation pages neither.
    app = FastAPI(
        title="loramux",
        version=version("loramux"),
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.services = services
    for router in (completions.router, chat.router, models.router, document.router):
        app.include_router(router)
    app.include_router(health_router(services.database, services.engine, services.trouble))
    app.add_middleware(Metered, metrics=services.metrics, logs_answers=services.settings.logs_answers)
    if services.tracing is not None:
        app.add_middleware(TracedRequests, tracing=services.tracing, paths=frozenset(ENDPOINTS))
    install_error_handling(app)
    return app


class Metered:
    """Counts answers and errors, times them to their last byte, and where that is wanted logs a line for each."""

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics, logs_answers: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._logs_answers = logs_answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        status = 500

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        endpoint = ENDPOINTS.get(scope["path"], "other")
        try:
            await self._app(scope, receive, send_noted)
        except Exception:
            self._metrics.errors.labels(endpoint, "internal_error").inc()
            raise
        finally:
            code = scope.get("state", {}).get("error_code")
            if code is not None:
                self._metrics.errors.labels(endpoint, code).inc()
            self._metrics.requests.labels(endpoint, str(status)).inc()
            seconds = time.monotonic() - started
            self._metrics.request_seconds.labels(endpoint).observe(seconds)
            if self._logs_answers:
                log.info("answered", endpoint=endpoint, status=status, code=code, seconds=round(seconds, 4))
