"""Authenticates callers of the gateway: a dependency of every route except the health routes."""

from __future__ import annotations

import base64
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
    presented = _presented(request)
    if not presented:
        raise Unauthenticated("send an API key: Authorization: Bearer sk-lmx-...", code="missing_api_key")
    # Most keys are cached and need no database lookup on another thread.
    principal = services.callers.api_keys.recent(presented)
    if principal is None:
        principal = await services.call(services.callers.api_keys.authenticate_bearer, presented)
    if principal is None:
        # The message starts like OpenAI's, because litellm recognises a refused key only by these words.
        raise Unauthenticated("Incorrect API key provided: it is unknown, expired or revoked")
    request.state.tenant, request.state.key_id = principal.tenant_slug, principal.key_id
    return principal


def _presented(request: Request) -> str:
    """Return the key that the request presents: as a bearer token, in the header of Anthropic's clients, or else as the
    password in the URL of a client that cannot send a key in another way (RFC 7617).
    """
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    kind, token = kind.lower(), token.strip()
    if kind == "bearer" and token:
        return token
    in_header = request.headers.get("x-api-key", "").strip()
    return _password(token) if kind == "basic" and not in_header else in_header


def _password(credentials: str) -> str:
    """Return the password of Basic credentials, or an empty string if they are malformed."""
    try:
        decoded = base64.b64decode(credentials, validate=True).decode()
    except ValueError:
        return ""
    return decoded.partition(":")[2].strip()


Caller = Annotated[Principal, Depends(authenticated)]
