"""`/v1/chat/completions` and below: lists, reads, changes and deletes stored chat completions."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.datastructures import QueryParams
from starlette.responses import Response

from loramux.platform.accounts.model_names import require_inference
from loramux.platform.accounts.principals import Principal
from loramux.platform.bodies.chat_request import MAX_METADATA, Metadata
from loramux.platform.bodies.request_body import parse_body, read_body
from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.errors import InvalidRequest, NotFound
from loramux.platform.openai_api.openapi_schemas import (
    DeletedChat,
    StoredChatDocument,
    StoredChatList,
    StoredMessageList,
)
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.error_responses import json_response
from loramux.platform.requests.item_pages import After, Limit, Order, item_page, shown_page
from loramux.platform.requests.openapi import takes
from loramux.platform.requests.services import GatewayServices
from loramux.platform.requests.storing import call_storing
from loramux.platform.stored_responses.chat_store import ChatFilter, StoredChat

_METADATA = re.compile(r"metadata\[([^\]]+)\]")

router = APIRouter(tags=["chat completions"])


class ChatChanges(StrictModel):
    metadata: Metadata | None


@router.get("/v1/chat/completions", response_model=StoredChatList)
async def list_chat_completions(
    request: Request,
    caller: Caller,
    services: Services,
    limit: Limit = 20,
    order: Order = "asc",
    after: After = None,
    model: Annotated[str | None, Query(max_length=200, description="Only answers of the model with this name.")] = None,
) -> Response:
    """List stored chat completions, oldest first. `metadata[KEY]=VALUE` selects those with this entry."""
    tenant_id = require_inference(caller)
    wanted = ChatFilter(
        # PostgreSQL refuses some characters, and no model has them in its name.
        model=model if model is None or model.isprintable() else "",
        metadata=_metadata(request.query_params),
        adapter_ids=caller.adapter_ids,
        limit=limit,
        after=after,
        is_ascending=order == "asc",
    )
    page = await services.call(services.stored.chats.page, tenant_id, wanted)
    return json_response(shown_page([chat.completion for chat in page.data], has_more=page.has_more))


@router.get("/v1/chat/completions/{completion_id}", response_model=StoredChatDocument)
async def retrieve_chat_completion(completion_id: str, caller: Caller, services: Services) -> Response:
    """Retrieve a stored chat completion."""
    return json_response((await _find(services, caller, completion_id)).completion)


@router.post(
    "/v1/chat/completions/{completion_id}", openapi_extra=takes(ChatChanges), response_model=StoredChatDocument
)
async def update_chat_completion(completion_id: str, request: Request, caller: Caller, services: Services) -> Response:
    """Replace the metadata of a stored chat completion."""
    changes = parse_body(await read_body(request, services.settings.max_body_bytes), ChatChanges)
    found = await _find(services, caller, completion_id)
    changed = replace(found, completion={**found.completion, "metadata": changes.metadata or {}})
    if not await call_storing(services, services.stored.chats.update, changed):
        raise _missing()
    return json_response(changed.completion)


@router.delete("/v1/chat/completions/{completion_id}", response_model=DeletedChat)
async def delete_chat_completion(completion_id: str, caller: Caller, services: Services) -> Response:
    """Delete a stored chat completion and the messages that are stored with it."""
    found = await _find(services, caller, completion_id)
    await services.call(services.stored.chats.delete, found.tenant_id, found.id)
    return json_response({"id": found.id, "object": "chat.completion.deleted", "deleted": True})


@router.get("/v1/chat/completions/{completion_id}/messages", response_model=StoredMessageList)
async def list_chat_messages(
    completion_id: str,
    caller: Caller,
    services: Services,
    limit: Limit = 20,
    order: Order = "asc",
    after: After = None,
) -> Response:
    """List the messages of the request of a stored chat completion."""
    found = await _find(services, caller, completion_id)
    messages = await services.call(services.stored.chats.messages, found.tenant_id, found.id)
    return json_response(item_page(messages, limit, order, after))


async def _find(services: GatewayServices, caller: Principal, completion_id: str) -> StoredChat:
    """Return a chat completion of the caller's tenant. Raises NotFound if the caller cannot see one with this ID."""
    found = await services.call(services.stored.chats.get, require_inference(caller), completion_id)
    if found is None or not caller.may_name(found.adapter_id):
        raise _missing()
    return found


def _metadata(query: QueryParams) -> dict[str, str]:
    found = {}
    for name, value in query.multi_items():
        if name.startswith("metadata"):
            key = _METADATA.fullmatch(name)
            if key is None:
                raise InvalidRequest("write metadata[KEY]=VALUE", param="metadata")
            found[key[1]] = value
    if len(found) > MAX_METADATA:
        raise InvalidRequest(f"at most {MAX_METADATA} entries are allowed", param="metadata")
    return found


def _missing() -> NotFound:
    return NotFound("there is no such stored chat completion", param="completion_id", code="chat_completion_not_found")
