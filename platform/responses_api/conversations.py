"""`/v1/conversations`: conversations whose items responses read and extend."""

from __future__ import annotations

import secrets
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from loramux.platform.accounts.model_names import require_inference
from loramux.platform.accounts.principals import Principal
from loramux.platform.bodies.chat_request import Metadata
from loramux.platform.bodies.request_body import parse_body_on, read_body, validated
from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.errors import ApiError, InvalidRequest, NotFound
from loramux.platform.requests.answers import Document
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.error_responses import json_response
from loramux.platform.requests.item_pages import After, Limit, Order, item_page
from loramux.platform.requests.openapi import takes
from loramux.platform.requests.services import GatewayServices
from loramux.platform.requests.storing import call_storing
from loramux.platform.responses_api.input_items import InputItem, ItemReference, refuse_other_items
from loramux.platform.responses_api.openapi_schemas import (
    ConversationDocument,
    ConversationItemDocument,
    ConversationItemList,
    DeletedConversation,
)
from loramux.platform.responses_api.stored_items import listed_items
from loramux.platform.stored_responses.conversation_store import ConversationFull, DuplicateItem, StoredConversation
from loramux.platform.stored_responses.sealing import ContentTooLong

MAX_NEW_ITEMS = 20
"""Maximum number of items that one call can add, as in the OpenAI API."""

router = APIRouter(tags=["conversations"])


class NewConversation(StrictModel):
    metadata: Metadata | None = None
    items: Annotated[list[InputItem], Field(fail_fast=True, max_length=MAX_NEW_ITEMS)] | None = None


class ConversationChanges(StrictModel):
    metadata: Metadata | None


class NewItems(StrictModel):
    items: Annotated[list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_NEW_ITEMS)]


@router.post("/v1/conversations", openapi_extra=takes(NewConversation), response_model=ConversationDocument)
async def create_conversation(request: Request, caller: Caller, services: Services) -> Response:
    """Create a conversation, which can begin with some items."""
    tenant_id = require_inference(caller)
    sent = await read_body(request, services.settings.max_body_bytes)
    body = await parse_body_on(services.compute, sent or b"{}", _new_conversation)
    days = await _days(services, tenant_id)
    try:
        made = await call_storing(services, services.stored.conversations.create, tenant_id, body.metadata or {}, days)
    except (ConversationFull, ContentTooLong) as error:
        raise _full(error) from None
    if body.items:
        try:
            await _append(services, made, body.items, days)
        except ApiError:
            await services.call(services.stored.conversations.delete, made)
            raise
    return json_response(_shown(made))


@router.get("/v1/conversations/{conversation_id}", response_model=ConversationDocument)
async def retrieve_conversation(conversation_id: str, caller: Caller, services: Services) -> Response:
    """Retrieve a conversation, without its items."""
    return json_response(_shown(await find_conversation(services, caller, conversation_id, _missing())))


@router.post(
    "/v1/conversations/{conversation_id}", openapi_extra=takes(ConversationChanges), response_model=ConversationDocument
)
async def update_conversation(conversation_id: str, request: Request, caller: Caller, services: Services) -> Response:
    """Replace the metadata of a conversation."""
    sent = await read_body(request, services.settings.max_body_bytes)
    body = await parse_body_on(services.compute, sent, lambda document: validated(document, ConversationChanges))
    found = await find_conversation(services, caller, conversation_id, _missing())
    metadata = body.metadata or {}
    try:
        is_changed = await call_storing(services, services.stored.conversations.update, found, metadata)
    except ContentTooLong as error:
        raise _full(error) from None
    if not is_changed:
        raise _missing()
    return json_response({**_shown(found), "metadata": metadata})


@router.delete("/v1/conversations/{conversation_id}", response_model=DeletedConversation)
async def delete_conversation(conversation_id: str, caller: Caller, services: Services) -> Response:
    """Delete a conversation with its items. Responses that are stored keep their own copies."""
    found = await find_conversation(services, caller, conversation_id, _missing())
    await services.call(services.stored.conversations.delete, found)
    return json_response({"id": found.id, "object": "conversation.deleted", "deleted": True})


@router.post(
    "/v1/conversations/{conversation_id}/items", openapi_extra=takes(NewItems), response_model=ConversationItemList
)
async def create_items(conversation_id: str, request: Request, caller: Caller, services: Services) -> Response:
    """Add items to the end of a conversation."""
    sent = await read_body(request, services.settings.max_body_bytes)
    body = await parse_body_on(services.compute, sent, _new_items)
    found = await find_conversation(services, caller, conversation_id, _missing())
    days = await _days(services, found.tenant_id)
    return json_response(item_page(await _append(services, found, body.items, days), MAX_NEW_ITEMS, "asc", None))


@router.get("/v1/conversations/{conversation_id}/items", response_model=ConversationItemList)
async def list_items(
    conversation_id: str,
    caller: Caller,
    services: Services,
    limit: Limit = 20,
    order: Order = "desc",
    after: After = None,
) -> Response:
    """List the items of a conversation, newest first."""
    found = await find_conversation(services, caller, conversation_id, _missing())
    items = await services.call(services.stored.conversations.items, found)
    return json_response(item_page(items, limit, order, after))


@router.get("/v1/conversations/{conversation_id}/items/{item_id}", response_model=ConversationItemDocument)
async def retrieve_item(conversation_id: str, item_id: str, caller: Caller, services: Services) -> Response:
    """Retrieve an item of a conversation."""
    found = await find_conversation(services, caller, conversation_id, _missing())
    item = await services.call(services.stored.conversations.item, found, item_id)
    if item is None:
        raise _no_item()
    return json_response(item)


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}", response_model=ConversationDocument)
async def delete_item(conversation_id: str, item_id: str, caller: Caller, services: Services) -> Response:
    """Delete an item of a conversation, and return the conversation."""
    found = await find_conversation(services, caller, conversation_id, _missing())
    if not await services.call(services.stored.conversations.delete_item, found, item_id):
        raise _no_item()
    return json_response(_shown(found))


async def find_conversation(
    services: GatewayServices, caller: Principal, conversation_id: str, missing: NotFound
) -> StoredConversation:
    """Return a conversation of the caller's tenant. Raises `missing` if the caller cannot see such a conversation.

    A key that is limited to some adapters sees only conversations in which no other model has answered.
    """
    found = await services.call(services.stored.conversations.get, require_inference(caller), conversation_id)
    if found is None or not all(map(caller.may_name, found.adapter_ids)):
        raise missing
    return found


async def _append(
    services: GatewayServices, found: StoredConversation, items: list[InputItem], days: int
) -> list[Document]:
    documents = listed_items(items, found.home, first=secrets.randbits(48))
    try:
        append = services.stored.conversations.append
        is_added = await call_storing(services, append, found.tenant_id, found.id, documents, days)
    except (ConversationFull, ContentTooLong) as error:
        raise _full(error) from None
    except DuplicateItem as error:
        raise InvalidRequest(
            "the conversation already has an item with this id", param=f"items[{error.index}].id", code="duplicate_item"
        ) from None
    if not is_added:
        raise _missing()
    return documents


def _new_conversation(document: Document) -> NewConversation:
    refuse_other_items(document.get("items"), "items")
    body = validated(document, NewConversation)
    _without_references(body.items)
    return body


def _new_items(document: Document) -> NewItems:
    refuse_other_items(document.get("items"), "items")
    body = validated(document, NewItems)
    _without_references(body.items)
    return body


def _without_references(items: list[InputItem] | None) -> None:
    for index, item in enumerate(items or ()):
        if isinstance(item, ItemReference):
            raise InvalidRequest(
                "send the item itself instead of a reference", param=f"items[{index}]", code="unsupported_item"
            )


async def _days(services: GatewayServices, tenant_id: str) -> int:
    """Return the number of days for which the tenant's objects are stored. Raises InvalidRequest if it is 0."""
    tenants = services.callers.tenants
    share = tenants.recent_share(tenant_id)
    if share is None:
        share = await services.call(tenants.share, tenant_id)
    if not services.stored.is_open or share.response_days == 0:
        raise InvalidRequest(
            "this server does not store conversations for your tenant: send all items in input",
            code="storage_not_allowed",
        )
    return share.response_days


def _shown(conversation: StoredConversation) -> Document:
    return {
        "id": conversation.id,
        "object": "conversation",
        "created_at": conversation.created_us // 1_000_000,
        "metadata": conversation.metadata,
    }


def _full(error: Exception) -> InvalidRequest:
    return InvalidRequest(str(error), code="conversation_full")


def _missing() -> NotFound:
    return NotFound("there is no such conversation", param="conversation_id", code="conversation_not_found")


def _no_item() -> NotFound:
    return NotFound("the conversation has no such item", param="item_id", code="item_not_found")
