"""The `/metrics` route for Prometheus, which requires a scrape token or a call from this machine."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from fastapi import APIRouter, Request, Response

from loramux.engine.protocol.messages import Stats, StatsRequest
from loramux.platform.engine_link.engine_client import EngineClient, EngineUnavailable
from loramux.platform.errors import Unauthenticated
from loramux.platform.requests.openapi import Responses, errors
from loramux.platform.telemetry.engine_metrics import render_engine
from loramux.platform.telemetry.metrics import CONTENT_TYPE, GatewayMetrics

STATS_TIMEOUT_S = 2.0
PROXY_HEADERS = ("forwarded", "via", "x-real-ip")


def metrics_router(metrics: GatewayMetrics, engine: EngineClient, token: str | None, is_loopback: bool) -> APIRouter:
    """The `/metrics` route. If a token is set, every call needs it. While the engine does not answer,
    `loramux_engine_up` is the only engine metric.
    """
    router = APIRouter()

    example = {"schema": {"type": "string"}, "example": "loramux_engine_up 1.0\n"}
    text: Responses = {200: {"content": {"text/plain": example}}}

    @router.get("/metrics", tags=["health"], response_class=Response, responses={**text, **errors(401)})
    async def scrape(request: Request) -> Response:
        """Get metrics for Prometheus. Requires the scrape token if one is set, otherwise a call from this machine."""
        if token is not None:
            presented = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(presented.encode(), token.encode()):
                raise Unauthenticated("send the scrape token: Authorization: Bearer TOKEN")
        elif not (is_loopback and _is_direct(request)):
            raise Unauthenticated("this call requires a scrape token: set metrics_token")
        return Response(metrics.render() + render_engine(await _stats(engine), engine.info), media_type=CONTENT_TYPE)

    return router


def _is_direct(request: Request) -> bool:
    """Return whether the call is addressed to this machine and no proxy forwarded it. The client's address does not
    show this, because a local proxy also calls from loopback.
    """
    if any(name in PROXY_HEADERS or name.startswith("x-forwarded-") for name in request.headers):
        return False
    try:
        host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _stats(engine: EngineClient) -> Stats | None:
    try:
        return await engine.call(StatsRequest(), STATS_TIMEOUT_S)
    except (EngineUnavailable, TimeoutError):
        return None
