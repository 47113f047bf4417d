"""`GET /load`: how many of the caller's requests the server runs."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response
from typing_extensions import TypedDict

from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.error_responses import json_response

router = APIRouter()


class LoadDocument(TypedDict):
    """The number of running requests, waiting ones included."""

    server_load: int


@router.get("/load", tags=["server"], response_model=LoadDocument)
async def server_load(caller: Caller, services: Services) -> Response:
    """Report how many requests of the caller's tenant this server runs. Other tenants' requests are not counted."""
    num_running = 0 if caller.tenant_id is None else services.run.requests.num_running_of(caller.tenant_id)
    return json_response({"server_load": num_running})
