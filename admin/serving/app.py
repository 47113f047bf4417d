"""The admin listener: `/admin/v1`, the console, `/metrics` and `/health`."""

from __future__ import annotations

from functools import cache

from fastapi import APIRouter, FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from loramux.adapter_store.errors import StoreError
from loramux.admin.console.app import create_console, to_console
from loramux.admin.rest.access import READER
from loramux.admin.rest.accounts import api_keys, audit_log, tenants, webhooks
from loramux.admin.rest.adapters import (
    adapters,
    aliases,
    evals,
    events,
    grants,
    jobs,
    models,
    pins,
    pushes,
    uploads,
    version_files,
    versions,
)
from loramux.admin.rest.engine import bases, engine_state, replicas, requests_in_flight, residency, server
from loramux.admin.rest.idempotency import IdempotentAnswers, Replayed, answer_again
from loramux.admin.rest.services import AdminServices
from loramux.admin.rest.usage import batches, costs, prices, quotas, usage
from loramux.admin.server.metrics_route import SCRAPED_PATHS, RoutingNames, metrics_router
from loramux.platform.listener.health import HEALTH_PATHS, add_health
from loramux.platform.listener.openapi_route import ListenerDocument, listener_app, operation_id
from loramux.platform.requests.error_responses import ErrorResponses, install_error_handling
from loramux.platform.requests.store_errors import api_error
from loramux.platform.telemetry.http_metrics import HttpMetrics, counting_admin_calls
from loramux.platform.telemetry.routing_metrics import ResidentNames

ROUTERS = (
    tenants,
    api_keys,
    adapters,
    aliases,
    grants,
    uploads,
    pushes,
    versions,
    version_files,
    evals,
    models,
    pins,
    residency,
    replicas,
    bases,
    requests_in_flight,
    batches,
    jobs,
    quotas,
    prices,
    usage,
    costs,
    audit_log,
    events,
    webhooks,
    engine_state,
    server,
)

ADMIN_DOCUMENT = ListenerDocument(
    description="""The administration API of loramux.

Send `Authorization: Bearer KEY`. With a tenant's key, the same paths show only that tenant's resources; another
tenant's resource returns the same 404 as a missing one. Lists are paged with `after` and `before`. A POST can be
repeated with the same `Idempotency-Key` for 24 hours. An update sends the ETag that the caller last read as
`If-Match`. Every error has the same envelope, `{"error": {"message", "type", "param", "code"}}`, and every response has
an `x-request-id`.""",
    # `/metrics` can require its own token.
    public=HEALTH_PATHS | SCRAPED_PATHS,
    readers="Any key of the admin API can read this document.",
    is_idempotent=True,
)

OPENAI_LISTENER = "the OpenAI API is on the server's other port, 8000 by default"
"""Where the paths under `/v1` are, in the error of a client with the wrong port."""


@cache
def _rest_routes() -> APIRouter:
    """Return the admin routes, which contain no app state. They are built only once, because that takes 200 ms."""
    routes = APIRouter(generate_unique_id_function=operation_id)
    for module in ROUTERS:
        routes.include_router(module.router, prefix="/admin/v1")
    routes.include_router(ADMIN_DOCUMENT.router(READER))
    return routes


def create_admin_app(services: AdminServices, root_path: str = "") -> FastAPI:
    """Return the admin listener's ASGI app. Every route under `/admin/v1` declares which callers it admits.

    `root_path` is the prefix under which a proxy publishes the app, such as `/loramux`.
    """
    app = listener_app("loramux admin")
    app.state.services = services
    app.add_middleware(IdempotentAnswers, services=services)
    app.add_exception_handler(Replayed, answer_again)
    # Prometheus scrapes do not count as admin calls.
    app.add_middleware(HttpMetrics, count=counting_admin_calls(services.metrics.admin), unmeasured=SCRAPED_PATHS)
    install_error_handling(app, ErrorResponses({StoreError: api_error}, elsewhere={"/v1/": OPENAI_LISTENER}))
    app.router.routes.extend(_rest_routes().routes)
    resident = ResidentNames.over(services.database)
    names = RoutingNames(services.engine.self_check.served_name, lambda digests: services.call(resident.of, digests))
    engines = services.engine.engines
    app.include_router(
        metrics_router(
            services.metrics,
            services.engine.client,
            services.metrics_token,
            services.is_loopback,
            names,
            lambda: services.engine.measured,
        )
    )
    add_health(app, services.database, services.engine.client, services.trouble, tells_why=True, engines=engines)
    app.add_route("/", to_console, include_in_schema=False)
    app.add_route("/console", to_console, include_in_schema=False)
    app.mount("/console", create_console(services, app))
    if root_path:
        app.add_middleware(UnderRootPath, root_path=root_path)
    return app


class UnderRootPath:
    """Sets the app's public path prefix in each request, so that the app's links work through the proxy, whether or not
    the proxy strips the prefix.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            root, path = self._root_path, scope["path"]
            if not (path == root or path.startswith(f"{root}/")):
                scope = {**scope, "path": root + path, "raw_path": root.encode() + (scope.get("raw_path") or b"")}
            scope = {**scope, "root_path": root}
        await self._app(scope, receive, send)
