"""The admin listener: `/admin/v1`, `/metrics` and `/health`."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI

from loramux.adapter_store.errors import StoreError
from loramux.admin.metrics_route import metrics_router
from loramux.admin.rest import (
    adapters,
    aliases,
    api_keys,
    engine_state,
    grants,
    jobs,
    pins,
    quotas,
    requests_in_flight,
    residency,
    tenants,
    uploads,
    usage,
    version_files,
    versions,
)
from loramux.admin.rest.idempotency import IdempotentAnswers, Replayed, answer_again
from loramux.admin.services import AdminServices
from loramux.admin.store_errors import api_error
from loramux.platform.error_responses import install_error_handling
from loramux.platform.health import health_router

ROUTERS = (
    tenants,
    api_keys,
    adapters,
    aliases,
    grants,
    uploads,
    versions,
    version_files,
    pins,
    residency,
    requests_in_flight,
    jobs,
    quotas,
    usage,
    engine_state,
)


def create_admin_app(services: AdminServices) -> FastAPI:
    """The admin side as an ASGI app. Every route below `/admin/v1` names the kind of caller that it lets in."""
    app = FastAPI(title="loramux admin", openapi_url=None, docs_url=None, redoc_url=None)
    app.state.services = services
    app.add_middleware(IdempotentAnswers, services=services)
    app.add_exception_handler(Replayed, answer_again)
    install_error_handling(app, {StoreError: api_error})
    admin = APIRouter(prefix="/admin/v1")
    for module in ROUTERS:
        admin.include_router(module.router)
    app.include_router(admin)
    app.include_router(metrics_router(services.metrics, services.engine, services.metrics_token, services.is_loopback))
    app.include_router(health_router(services.database, services.engine, services.executor, tells_why=True))
    return app
