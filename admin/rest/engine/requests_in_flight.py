"""`/requests`: list the requests in flight on every gateway, and cancel one."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter
from typing_extensions import TypedDict

from loramux.admin.rest.access import Caller, Reader, Services, Writer, tenant_filter
from loramux.admin.rest.listing import (
    ListDocument,
    Paging,
    TenantParam,
    check_identifier,
    list_document,
    paged,
    seconds,
)
from loramux.admin.rest.services import AdminServices
from loramux.platform.errors import NotFound
from loramux.platform.generation.requests_in_flight import RequestInFlight

router = APIRouter(prefix="/requests", tags=["requests"])


class RequestDocument(TypedDict):
    """One unsettled request. `completion_tokens` is up to five seconds old if another gateway runs the request."""

    id: str
    object: Literal["request"]
    tenant_id: str
    tenant: str
    api_key_id: str
    model: str
    endpoint: str
    state: Literal["running", "cancelling"]
    prompt_tokens: int
    completion_tokens: int
    reserved_tokens: int
    created_at: int
    age_s: float


@router.get("")
@paged
async def list_requests(
    services: Services, caller: Reader, paging: Paging, tenant: TenantParam = None
) -> ListDocument[RequestDocument]:
    """List the requests in flight, newest first."""
    tenant_id = await tenant_filter(services, caller, tenant)
    page = await services.call(services.engine.requests.list, tenant_id, *paging, caller.adapter_ids)
    live, now_us = services.engine.live.progress(), services.database.now_us()
    return list_document(page, lambda found: _describe(found, live.get(found.id), now_us))


@router.get("/{request_id}")
async def get_request(request_id: str, services: Services, caller: Reader) -> RequestDocument:
    """Get one request in flight. Finished requests are in the usage events."""
    found = await _find(services, caller, request_id)
    return _describe(found, services.engine.live.progress().get(found.id), services.database.now_us())


@router.post("/{request_id}/cancel", status_code=202)
async def cancel_request(request_id: str, services: Services, caller: Writer) -> RequestDocument:
    """Cancel a request. Its client gets an error, and the tokens generated so far are charged.

    A request on this gateway ends immediately. A request on another gateway ends at its next checkpoint, within five
    seconds. Repeating the call changes nothing.
    """
    found = await _find(services, caller, request_id)
    cancelled = await services.call(services.engine.requests.cancel, found.id)
    live = services.engine.live.progress().get(found.id)
    services.engine.live.cancel(found.id)
    return {**_describe(cancelled or found, live, services.database.now_us()), "state": "cancelling"}


async def _find(services: AdminServices, caller: Caller, request_id: str) -> RequestInFlight:
    found = await services.call(services.engine.requests.get, check_identifier(request_id, "request"))
    if found is None or not caller.may_see_adapter(found.tenant_id, found.adapter_id):
        raise NotFound("there is no such request", code="request_not_found")
    return found


def _describe(found: RequestInFlight, live_tokens: int | None, now_us: int) -> RequestDocument:
    return {
        "id": found.id,
        "object": "request",
        "tenant_id": found.tenant_id,
        "tenant": found.tenant_slug,
        "api_key_id": found.api_key_id,
        "model": found.model,
        "endpoint": found.endpoint,
        "state": "running" if found.cancel_requested_us is None else "cancelling",
        "prompt_tokens": found.prompt_tokens,
        "completion_tokens": found.completion_tokens if live_tokens is None else live_tokens,
        "reserved_tokens": found.reserved_tokens,
        "created_at": seconds(found.created_us),
        "age_s": max(0.0, (now_us - found.created_us) / 1e6),
    }
