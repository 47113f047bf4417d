"""The console as an ASGI app, mounted at `/console` of the admin app."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from loramux.admin.console.browser_guard import SecurityHeaders
from loramux.admin.console.console_site import Site
from loramux.admin.console.forms import MAX_FORM_BYTES, Form
from loramux.admin.console.live import LivePage
from loramux.admin.console.oidc.role_confirmation import ConfirmInBrowser
from loramux.admin.console.pages import (
    adapters,
    aliases,
    bases,
    batches,
    evals,
    events,
    keys,
    playground,
    purges,
    quotas,
    records,
    requests,
    residency,
    tenants,
    usage,
    versions,
)
from loramux.admin.console.pages.overview import Overview
from loramux.admin.console.sign_in.login import Login
from loramux.admin.console.sign_in.oidc_login import OidcLogin
from loramux.admin.console.static_files import StaticFiles
from loramux.admin.console.visit import Handler, Visit, action, find_session, page, problem
from loramux.admin.rest.services import AdminServices
from loramux.migrations.database import DATABASE_TROUBLE

GET, POST = ["GET"], ["POST"]


def create_console(services: AdminServices, rest: ASGIApp) -> Starlette:
    site = Site.over(services, rest)
    oidc = None
    if services.oidc is not None and site.provider is not None:
        oidc = OidcLogin(site, services.oidc, site.provider)
    login = Login(site, oidc)
    overview, resident = Overview(), residency.Residency()
    every_request = LivePage("requests", requests)
    every_batch = LivePage("batches", batches)
    every_event = LivePage("events", events)

    def shows(path: str, handler: Handler) -> Route:
        return Route(path, page(site, handler), methods=GET)

    def does(path: str, handler: Handler, max_form_bytes: int = MAX_FORM_BYTES) -> Route:
        return Route(path, action(site, handler, max_form_bytes=max_form_bytes), methods=POST)

    def carries(path: str, handler: Handler, method: str) -> Route:
        """Return the route of an action that a script calls. The script sends the session's token in a header."""
        return Route(path, action(site, handler, reads_form=False), methods=[method])

    async def answer(request: Request, error: Exception) -> Response:
        return await _unknown(site, request, error)

    sign_on = []
    if oidc is not None:
        sign_on = [
            Route("/oidc/login", oidc.begin, methods=GET),
            Route("/oidc/callback", oidc.finish, methods=GET),
        ]
    return Starlette(
        routes=[
            Route("/login", login.show, methods=GET),
            Route("/login", login.sign_in, methods=POST),
            does("/logout", login.sign_out),
            *sign_on,
            Mount("/static", StaticFiles()),
            shows("/", overview.show),
            shows("/live/overview", overview.live),
            shows("/adapters", adapters.show_list),
            does("/adapters", adapters.create),
            shows("/adapters/{adapter_id}", adapters.show),
            shows("/adapters/{adapter_id}/state", adapters.confirm_state),
            does("/adapters/{adapter_id}/state", adapters.set_disabled),
            shows("/adapters/{adapter_id}/delete", adapters.confirm_delete),
            does("/adapters/{adapter_id}/delete", adapters.delete),
            shows("/adapters/{adapter_id}/purge", purges.confirm_adapter),
            does("/adapters/{adapter_id}/purge", purges.purge_adapter),
            shows("/adapters/{adapter_id}/move", aliases.move),
            does("/adapters/{adapter_id}/aliases", aliases.set_alias),
            shows("/adapters/{adapter_id}/aliases/{name}/rollback", aliases.confirm_rollback),
            does("/adapters/{adapter_id}/aliases/{name}/rollback", aliases.roll_back),
            shows("/adapters/{adapter_id}/aliases/{name}/delete", aliases.confirm_delete),
            does("/adapters/{adapter_id}/aliases/{name}/delete", aliases.delete),
            shows("/adapters/{adapter_id}/evals", evals.show_list),
            does("/adapters/{adapter_id}/evals", evals.start, evals.MAX_FORM_BYTES),
            shows("/adapters/{adapter_id}/evals/{eval_id}", evals.show),
            does("/adapters/{adapter_id}/evals/{eval_id}/cancel", evals.cancel),
            does("/adapters/{adapter_id}/grants", adapters.add_grant),
            shows("/adapters/{adapter_id}/grants/remove", adapters.confirm_remove_grant),
            does("/adapters/{adapter_id}/grants/remove", adapters.remove_grant),
            carries("/adapters/{adapter_id}/uploads", versions.declare_upload, "POST"),
            carries("/adapters/{adapter_id}/uploads/{upload_id}", versions.cancel_upload, "DELETE"),
            carries("/adapters/{adapter_id}/uploads/{upload_id}/files/{name}", versions.put_file, "PUT"),
            carries("/adapters/{adapter_id}/versions", versions.create, "POST"),
            shows("/adapters/{adapter_id}/versions/{number:int}", versions.show),
            # The first route that matches answers, so `purge` comes before `{verb}`.
            shows("/adapters/{adapter_id}/versions/{number:int}/purge", purges.confirm_version),
            does("/adapters/{adapter_id}/versions/{number:int}/purge", purges.purge_version),
            shows("/adapters/{adapter_id}/versions/{number:int}/{verb}", versions.confirm_move),
            does("/adapters/{adapter_id}/versions/{number:int}/{verb}", versions.move),
            shows("/keys", keys.show_list),
            does("/keys", keys.create),
            shows("/keys/{key_id}/rotate", keys.confirm_rotate),
            does("/keys/{key_id}/rotate", keys.rotate),
            shows("/keys/{key_id}/revoke", keys.confirm_revoke),
            does("/keys/{key_id}/revoke", keys.revoke),
            shows("/tenants", tenants.show_list),
            does("/tenants", tenants.create),
            shows("/tenants/{tenant}", tenants.show),
            does("/tenants/{tenant}", tenants.change),
            shows("/tenants/{tenant}/state", tenants.confirm_state),
            shows("/tenants/{tenant}/delete", tenants.confirm_delete),
            does("/tenants/{tenant}/delete", tenants.delete),
            shows("/tenants/{tenant}/purge", purges.confirm_tenant),
            does("/tenants/{tenant}/purge", purges.purge_tenant),
            shows("/quotas", quotas.show_list),
            does("/quotas", quotas.set_limit),
            does("/quotas/preview", quotas.preview),
            shows("/quotas/again", quotas.confirm_again),
            shows("/quotas/{quota_id}/delete", quotas.confirm_delete),
            does("/quotas/{quota_id}/delete", quotas.delete),
            shows("/residency", resident.show),
            does("/residency", residency.place),
            shows("/live/residency", resident.live),
            shows("/bases", bases.show),
            shows("/bases/weights", bases.weigh),
            does("/bases/weights", bases.set_weights),
            shows("/bases/{base_id}/revalidate", bases.confirm_revalidate),
            does("/bases/{base_id}/revalidate", bases.revalidate),
            shows("/bases/{base_id}/forget", bases.confirm_forget),
            does("/bases/{base_id}/forget", bases.forget),
            shows("/requests", every_request.show),
            shows("/live/requests", every_request.live),
            shows("/requests/{request_id}/cancel", requests.confirm_cancel),
            does("/requests/{request_id}/cancel", requests.cancel),
            shows("/batches", every_batch.show),
            shows("/live/batches", every_batch.live),
            shows("/batches/{batch_id}/cancel", batches.confirm_cancel),
            does("/batches/{batch_id}/cancel", batches.cancel),
            shows("/jobs", records.jobs),
            shows("/events", every_event.show),
            shows("/live/events", every_event.live),
            shows("/audit", records.audit),
            shows("/health", records.health),
            shows("/usage", usage.show),
            shows("/usage.csv", usage.download),
            shows("/playground", playground.show),
            carries("/playground/stream", playground.stream, "POST"),
        ],
        middleware=[Middleware(SecurityHeaders)],
        exception_handlers={HTTPException: answer},
    )


async def to_console(request: Request) -> Response:
    """Redirect from `/` to the console, under the path prefix of a proxy if there is one."""
    return RedirectResponse(f"{request.scope.get('root_path', '')}/console/", 307)


async def _unknown(site: Site, request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = "there is no such page" if error.status_code in (404, 405) else str(error.detail)
    try:
        session = await find_session(site, request, is_use=False)
    except (*DATABASE_TROUBLE, ConfirmInBrowser):
        session = None
    visit = None if session is None else Visit(request, site, session, Form(()))
    return problem(site, request, visit, error.status_code, message)
