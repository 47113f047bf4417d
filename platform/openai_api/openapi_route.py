"""`/openapi.json` of the OpenAI listener, for whoever has a key."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from loramux.platform.openai_api.authentication import Caller
from loramux.platform.openai_api.error_responses import json_response
from loramux.platform.openai_api.openapi import describe

PUBLIC = frozenset({"/health/live", "/health/ready"})

DESCRIPTION = """The OpenAI-compatible side of loramux.

Send `Authorization: Bearer KEY`. The `model` field names the base or an adapter: `[tenant/]adapter[@version | :alias]`.
Fields that OpenAI knows and this server does not support are refused by name, never ignored where they would change
the answer. With `stream: true` the answer is a stream of server-sent events that ends with `data: [DONE]`; one that
breaks off ends with an error and without it. Every error has the one envelope,
`{"error": {"message", "type", "param", "code"}}`, and every response an `x-request-id`."""

router = APIRouter()


@router.get("/openapi.json", tags=["server"], response_model=dict[str, Any])
async def get_openapi_document(request: Request, caller: Caller) -> Response:
    """This document. Any key reads it."""
    app = request.app
    if not hasattr(app.state, "openapi_body"):
        app.state.openapi_body = json_response(document_of(app)).body
    return Response(app.state.openapi_body, media_type="application/json")


def document_of(app: FastAPI) -> dict[str, Any]:
    """The document of the OpenAI app."""
    return describe(app, description=DESCRIPTION, public=PUBLIC)
