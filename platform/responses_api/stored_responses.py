"""`GET` and `DELETE /v1/responses/{id}`, and `GET /v1/responses/{id}/input_items`: stored responses."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from loramux.platform.accounts.model_names import require_inference
from loramux.platform.accounts.principals import Principal
from loramux.platform.errors import InvalidRequest, NotFound
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.error_responses import json_response
from loramux.platform.requests.item_pages import After, Limit, Order, item_page
from loramux.platform.requests.openapi import errors
from loramux.platform.requests.services import GatewayServices
from loramux.platform.responses_api.openapi_schemas import DeletedResponse, InputItemList, ResponseDocument
from loramux.platform.stored_responses.response_store import StoredResponse

router = APIRouter()


async def find_response(
    services: GatewayServices, caller: Principal, response_id: str, missing: NotFound
) -> StoredResponse:
    """Return a stored response of the caller's tenant. Raises `missing` if the caller cannot see such a response."""
    require_inference(caller)
    assert caller.tenant_id is not None
    found = await services.call(services.stored.responses.get, caller.tenant_id, response_id)
    if found is None or not caller.may_name(found.adapter_id):
        raise missing
    return found


@router.get("/v1/responses/{response_id}", tags=["responses"], response_model=ResponseDocument, responses=errors(404))
async def retrieve_response(
    response_id: str, caller: Caller, services: Services, stream: Annotated[bool, Query()] = False
) -> Response:
    """Retrieve a stored response. Stored streams cannot be resumed."""
    if stream:
        raise InvalidRequest(
            "only responses in the background could be streamed again, and this server runs none",
            param="stream",
            code="unsupported_parameter",
        )
    return json_response((await find_response(services, caller, response_id, _missing())).response)


@router.delete("/v1/responses/{response_id}", tags=["responses"], response_model=DeletedResponse, responses=errors(404))
async def delete_response(response_id: str, caller: Caller, services: Services) -> Response:
    """Delete a stored response and the input that is stored with it."""
    found = await find_response(services, caller, response_id, _missing())
    await services.call(services.stored.responses.delete, found.tenant_id, found.id)
    return json_response({"id": found.id, "object": "response", "deleted": True})


@router.get(
    "/v1/responses/{response_id}/input_items",
    tags=["responses"],
    response_model=InputItemList,
    responses=errors(404),
)
async def list_input_items(
    response_id: str,
    caller: Caller,
    services: Services,
    limit: Limit = 20,
    order: Order = "desc",
    after: After = None,
) -> Response:
    """List the input items of a stored response and of the responses before it, newest first."""
    found = await find_response(services, caller, response_id, _missing())
    return json_response(item_page(found.input, limit, order, after))


def _missing() -> NotFound:
    return NotFound("there is no such stored response", param="response_id", code="response_not_found")
