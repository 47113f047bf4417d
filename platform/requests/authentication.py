"""Authenticates callers of the gateway: a dependency of every route except the health routes."""

from __future__ import annotations

from typing import Annotated, cast

from fastapi import Depends, Request

from loramux.platform.accounts.principals import Principal
from loramux.platform.errors import Unauthenticated
from loramux.platform.requests.services import GatewayServices
from loramux.platform.telemetry.tracing import traced


async def services_of(request: Request) -> GatewayServices:
    return cast(GatewayServices, request.app.state.services)


Services = Annotated[GatewayServices, Depends(services_of)]


async def authenticated(request: Request, services: Services) -> Principal:
    with traced("authenticate"):
        return await _authenticate(request, services)


async def _authenticate(request: Request, services: Services) -> Principal:
    kind, _, presented = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not presented.strip():
        raise Unauthenticated("send an API key: Authorization: Bearer sk-lmx-...", code="missing_api_key")
    # Most keys are cached and need no database lookup on another thread.
    principal = services.callers.api_keys.recent(presented.strip())
    if principal is None:
        principal = await services.call(services.callers.api_keys.authenticate_bearer, presented.strip())
    if principal is None:
        # The message starts like OpenAI's, because litellm recognises a refused key only by these words.
        raise Unauthenticated("Incorrect API key provided: it is unknown, expired or revoked")
    return principal


Caller = Annotated[Principal, Depends(authenticated)]
