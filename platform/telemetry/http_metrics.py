"""Counts each listener's responses and measures the time to their last byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from loramux.platform.telemetry.package_metrics import AdminMetrics, ApiMetrics

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"})

CALLER = ("tenant", "key_id", "model")
"""Attributes of a request's state that say who has sent it, and for which model."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredCall:
    """One HTTP call that a listener answered or tried to answer."""

    method: str
    path: str
    status: int
    """The status that was sent. 500 if no response was sent."""
    error_code: str | None
    caller: Mapping[str, str | None]
    """The caller's tenant, its key, and the model that answers, as far as they became known."""
    has_raised: bool
    seconds: float
    """Time from the call to the last byte of its response."""


Count = Callable[[AnsweredCall], None]


class HttpMetrics:
    """Measures every call to a listener, except calls to `unmeasured` paths, and passes it to `count`."""

    def __init__(self, app: ASGIApp, count: Count, unmeasured: frozenset[str] = frozenset()) -> None:
        self._app = app
        self._count = count
        self._unmeasured = unmeasured

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # ASGI's path includes the prefix under which a proxy publishes the app.
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) in self._unmeasured:
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        status = 500
        has_raised = False

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception:
            has_raised = True
            raise
        finally:
            state = scope.get("state", {})
            self._count(
                AnsweredCall(
                    method=scope["method"],
                    path=scope["path"],
                    status=status,
                    error_code=state.get("error_code"),
                    caller={name: state.get(name) for name in CALLER},
                    has_raised=has_raised,
                    seconds=time.monotonic() - started_s,
                )
            )


def counting_endpoints(metrics: ApiMetrics, endpoints: Mapping[str, str], logs_answers: bool) -> Count:
    """Count the OpenAI listener's responses and errors by endpoint. With `logs_answers`, also log each response."""

    def count(call: AnsweredCall) -> None:
        endpoint, status = endpoints.get(call.path, "other"), str(call.status)
        if call.has_raised:
            metrics.errors.labels(endpoint, "internal_error", status).inc()
        if call.error_code is not None:
            metrics.errors.labels(endpoint, call.error_code, status).inc()
        metrics.requests.labels(endpoint, status).inc()
        metrics.request_seconds.labels(endpoint).observe(call.seconds)
        if logs_answers:
            seconds = round(call.seconds, 4)
            log.info(
                "answered",
                endpoint=endpoint,
                status=call.status,
                code=call.error_code,
                seconds=seconds,
                **call.caller,
            )

    return count


def counting_admin_calls(metrics: AdminMetrics) -> Count:
    """Count the admin listener's responses by method and status."""

    def count(call: AnsweredCall) -> None:
        # A client can send any string as the method.
        method = call.method if call.method in METHODS else "other"
        metrics.requests.labels(method, str(call.status)).inc()
        metrics.request_seconds.observe(call.seconds)

    return count
