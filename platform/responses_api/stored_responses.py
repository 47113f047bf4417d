"""`/v1/responses/{id}` and below: reads, streams again, cancels and deletes stored responses."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from loramux.platform.accounts.model_names import require_inference
from loramux.platform.accounts.principals import Principal
from loramux.platform.errors import InvalidRequest, NotFound
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.error_responses import json_response
from loramux.platform.requests.item_pages import After, Limit, Order, item_page
from loramux.platform.requests.services import GatewayServices
from loramux.platform.requests.sse import EventStream
from loramux.platform.responses_api.lost_responses import end_if_lost
from loramux.platform.responses_api.openapi_schemas import DeletedResponse, InputItemList, ResponseDocument
from loramux.platform.responses_api.response_stream import check_resumable, follow
from loramux.platform.stored_responses.response_store import StoredResponse

CANCEL_WAIT_S = 2.0
"""How long a cancellation waits for the end of the response, in seconds."""

router = APIRouter(tags=["responses"])


async def find_response(
    services: GatewayServices, caller: Principal, response_id: str, missing: NotFound
) -> StoredResponse:
    """Return a stored response of the caller's tenant. Raises `missing` if the caller cannot see such a response.

    A key that is limited to some adapters sees only responses to which no other model has contributed, also earlier.
    """
    found = await end_if_lost(services, require_inference(caller), response_id)
    if found is None or not all(map(caller.may_name, found.adapter_ids)):
        raise missing
    return found


@router.get("/v1/responses/{response_id}", response_model=ResponseDocument)
async def retrieve_response(
    response_id: str,
    request: Request,
    caller: Caller,
    services: Services,
    stream: Annotated[bool, Query()] = False,
    starting_after: Annotated[
        int | None,
        Query(ge=0, lt=2**31, description="Sequence number of the event after which the stream continues."),
    ] = None,
) -> Response:
    """Retrieve a stored response. With `stream`, the events of a response in the background are sent again."""
    found = await find_response(services, caller, response_id, _missing())
    if stream:
        after = -1 if starting_after is None else starting_after
        await check_resumable(services, found, after)
        return EventStream(follow(services, request.receive, found, after), {})
    if starting_after is not None:
        raise InvalidRequest("starting_after needs stream=true", param="starting_after")
    return json_response(found.response)


@router.post("/v1/responses/{response_id}/cancel", response_model=ResponseDocument)
async def cancel_response(response_id: str, caller: Caller, services: Services) -> Response:
    """Cancel a response in the background. The tokens generated until then are charged."""
    found = await find_response(services, caller, response_id, _missing())
    if found.state is None:
        raise InvalidRequest("only responses with background: true can be cancelled", param="response_id")
    if found.is_unfinished:
        await _cancel(services, found)
        found = await find_response(services, caller, response_id, _missing())
    if found.response["status"] != "cancelled":
        raise InvalidRequest(
            f"the response is already {found.response['status']}", param="response_id", code="response_finished"
        )
    return json_response(found.response)


@router.delete("/v1/responses/{response_id}", response_model=DeletedResponse)
async def delete_response(response_id: str, caller: Caller, services: Services) -> Response:
    """Delete a stored response and the input that is stored with it. A response that is not finished is cancelled."""
    found = await find_response(services, caller, response_id, _missing())
    if found.is_unfinished:
        await _cancel(services, found)
    await services.call(services.stored.responses.delete, found.tenant_id, found.id)
    return json_response({"id": found.id, "object": "response", "deleted": True})


async def _cancel(services: GatewayServices, found: StoredResponse) -> None:
    """Cancel an unfinished response. If this server makes it, it usually ends before this returns."""
    with services.stored.changes.watch(found.id) as watch:
        await services.call(services.stored.background.cancel, found)
        if services.run.requests.cancel(found.request_id):
            await watch.wait(CANCEL_WAIT_S)


@router.get("/v1/responses/{response_id}/input_items", response_model=InputItemList)
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
