"""`/openapi.json`: the admin listener's OpenAPI document, denied by default like everything else."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from loramux.admin.rest.access import Reader
from loramux.platform.openai_api.error_responses import json_response
from loramux.platform.openai_api.openapi import describe

PUBLIC = frozenset({"/health/live", "/health/ready", "/metrics"})
"""What asks for no key of ours; `/metrics` may ask for a token of its own."""

DESCRIPTION = """The administrator's side of loramux.

Send `Authorization: Bearer KEY`. A tenant's key sees the same paths filtered to its tenant; what is not its own is the
same 404 as what does not exist. Lists are walked by `after` and `before`. A POST may be repeated with the same
`Idempotency-Key` for 24 hours; what changes a thing says by `If-Match` which state of it was seen. Every error has the
one envelope, `{"error": {"message", "type", "param", "code"}}`, and every response an `x-request-id`."""

router = APIRouter()


@router.get("/openapi.json", tags=["server"], response_model=dict[str, Any])
async def get_openapi_document(request: Request, caller: Reader) -> Response:
    """This document. Any key of the admin API reads it."""
    app = request.app
    if not hasattr(app.state, "openapi_body"):
        app.state.openapi_body = json_response(document_of(app)).body
    return Response(app.state.openapi_body, media_type="application/json")


def document_of(app: FastAPI) -> dict[str, Any]:
    """The document of the admin app."""
    return describe(app, description=DESCRIPTION, public=PUBLIC, is_idempotent=True)
