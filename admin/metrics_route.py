"""`/metrics`, for Prometheus: with a scrape token, or without one where only this machine can ask."""

from __future__ import annotations

import hmac

from fastapi import APIRouter, Request, Response

from loramux.platform.errors import Unauthenticated
from loramux.platform.metrics import CONTENT_TYPE, GatewayMetrics


def metrics_router(metrics: GatewayMetrics, token: str | None, is_loopback: bool) -> APIRouter:
    """The route; a token that is set is always asked for."""
    router = APIRouter()

    @router.get("/metrics")
    async def scrape(request: Request) -> Response:
        if token is not None:
            presented = request.headers.get("authorization", "").removeprefix("Bearer ")
            if not hmac.compare_digest(presented.encode(), token.encode()):
                raise Unauthenticated("give the scrape token: Authorization: Bearer TOKEN")
        elif not is_loopback:
            raise Unauthenticated("metrics need a scrape token here: set metrics_token")
        return Response(metrics.render(), media_type=CONTENT_TYPE)

    return router
