"""`GET /version`, as in vLLM."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter
from starlette.responses import Response

from loramux.platform.openai_api.authentication import Caller
from loramux.platform.openai_api.error_responses import json_response
from loramux.platform.openai_api.openapi_schemas import VersionDocument

router = APIRouter()


@router.get("/version", tags=["server"], response_model=VersionDocument)
async def server_version(caller: Caller) -> Response:
    """Report the version of the server's software."""
    return json_response({"version": version("loramux")})
