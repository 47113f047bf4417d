"""`/metrics` for Prometheus and `/metrics/routing` for routers: with a scrape token, or called from this machine."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from fastapi import APIRouter, Request, Response

from loramux.engine.protocol.messages import Stats, StatsRequest
from loramux.platform.engine_link.engine_client import EngineClient, EngineUnavailable
from loramux.platform.errors import Unauthenticated
from loramux.platform.requests.openapi import Responses, errors
from loramux.platform.telemetry.engine_metrics import render_engine, render_engines
from loramux.platform.telemetry.metrics import CONTENT_TYPE, GatewayMetrics
from loramux.platform.telemetry.routing_metrics import render_routing

STATS_TIMEOUT_S = 2.0
SCRAPED_PATHS = frozenset({"/metrics", "/metrics/routing"})
"""Paths that need a scrape token instead of a key."""
PROXY_HEADERS = ("forwarded", "via", "x-real-ip")


@dataclass(frozen=True, slots=True)
class RoutingNames:
    """What `/metrics/routing` calls the base and the adapters with some digests."""

    served_name: str
    adapters: Callable[[Sequence[str]], Awaitable[Sequence[str]]]


def metrics_router(
    metrics: GatewayMetrics,
    engine: EngineClient,
    token: str | None,
    is_loopback: bool,
    names: RoutingNames | None = None,
    engines: Callable[[], Mapping[str, EngineClient]] = dict,
) -> APIRouter:
    """The `/metrics` route and, with `names`, `/metrics/routing`. If a token is set, every call needs it. While the
    engine does not answer, `loramux_engine_up` is the only engine metric. If `engines` returns the engines behind
    `engine`, `/metrics` has the metrics of each.
    """
    router = APIRouter()

    example = {"schema": {"type": "string"}, "example": "loramux_engine_up 1.0\n"}
    text: Responses = {200: {"content": {"text/plain": example}}}

    @router.get("/metrics", tags=["health"], response_class=Response, responses={**text, **errors(401)})
    async def scrape(request: Request) -> Response:
        """Get metrics for Prometheus. Requires the scrape token if one is set, otherwise a call from this machine."""
        _check_scraper(request, token, is_loopback)
        several = engines()
        own = await _engines_text(several) if several else await _engine_text(engine)
        return Response(metrics.render() + own, media_type=CONTENT_TYPE)

    if names is None:
        return router

    @router.get("/metrics/routing", tags=["health"], response_class=Response, responses={**text, **errors(401, 503)})
    async def scrape_routing(request: Request) -> Response:
        """Get the load and the adapters in the engine, under vLLM's names, for routers. Guarded like `/metrics`."""
        _check_scraper(request, token, is_loopback)
        stats = await _stats(engine)
        if stats is None:
            raise EngineUnavailable("the engine does not answer")
        adapters = await names.adapters([adapter.digest for adapter in stats.adapters])
        return Response(render_routing(stats, engine.info, names.served_name, adapters), media_type=CONTENT_TYPE)

    return router


def _check_scraper(request: Request, token: str | None, is_loopback: bool) -> None:
    if token is not None:
        presented = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(presented.encode(), token.encode()):
            raise Unauthenticated("send the scrape token: Authorization: Bearer TOKEN")
    elif not (is_loopback and _is_direct(request)):
        raise Unauthenticated("this call requires a scrape token: set metrics_token")


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


async def _engine_text(engine: EngineClient) -> bytes:
    return render_engine(await _stats(engine), engine.info)


async def _engines_text(engines: Mapping[str, EngineClient]) -> bytes:
    stats = await asyncio.gather(*map(_stats, engines.values()))
    # In a thread, because a cluster can have many engines.
    return await asyncio.to_thread(
        render_engines,
        {name: (found, engine.info) for (name, engine), found in zip(engines.items(), stats, strict=True)},
    )
