"""Ends responses in the background whose server died."""

from __future__ import annotations

from dataclasses import replace

from loramux.platform.errors import ApiError
from loramux.platform.requests.services import GatewayServices
from loramux.platform.responses_api.response_answer import cancelled_response, failed_response, numbered
from loramux.platform.stored_responses.background_store import NewEvents
from loramux.platform.stored_responses.response_store import StoredResponse


async def end_if_lost(services: GatewayServices, tenant_id: str, response_id: str) -> StoredResponse | None:
    """Return a tenant's stored response, or None if there is none. If no server makes it any more, it has failed."""
    found = await services.call(services.stored.responses.get, tenant_id, response_id)
    if found is None or not found.is_lost:
        return found
    if found.state == "cancelling":
        response, events = cancelled_response(found.response)
    else:
        error = ApiError("the server that made the response stopped", code="server_stopped")
        response, events = failed_response(found.response, error)
    first = found.num_events or 0
    ended = replace(found, state=response["status"], response=response)
    await services.call(services.stored.background.finish, ended, NewEvents(first, numbered(events, first)), None)
    services.stored.changes.notify(response_id)
    return await services.call(services.stored.responses.get, tenant_id, response_id)
