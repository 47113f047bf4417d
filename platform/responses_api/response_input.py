"""Reads the body of a response request, and the stored items that it names."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from loramux.engine.text.text_tokenizer import MAX_TOKENISED_AT_ONCE
from loramux.platform.accounts.principals import Principal
from loramux.platform.bodies.request_body import parse_body_on, read_body
from loramux.platform.errors import InvalidRequest, NotFound
from loramux.platform.requests.answers import Document
from loramux.platform.requests.endpoint import Received
from loramux.platform.requests.error_responses import request_id_of
from loramux.platform.requests.services import GatewayServices
from loramux.platform.responses_api.conversations import find_conversation
from loramux.platform.responses_api.input_items import InputItem
from loramux.platform.responses_api.output_items import home_of
from loramux.platform.responses_api.response_chat import ResponseChat, chat_of, read_response_request
from loramux.platform.responses_api.response_request import ResponseRequest
from loramux.platform.responses_api.stored_items import read_items
from loramux.platform.responses_api.stored_responses import find_response
from loramux.platform.stored_responses.conversation_store import MAX_BYTES, MAX_ITEMS

MAX_REFERENCED = 64
"""Maximum number of stored objects whose items a request can refer to."""


async def read_response(request: Request, services: GatewayServices, caller: Principal) -> Received[ResponseChat]:
    """Read the body and the items that it continues or refers to.

    Raises InvalidRequest, PayloadTooLarge, NotFound or PermissionDenied.
    """
    sent = await read_body(request, services.settings.max_body_bytes)
    asked = await parse_body_on(services.compute, sent, read_response_request)
    adapter_ids: set[str | None] = set()
    earlier = await _earlier(services, caller, asked, adapter_ids)
    refers = bool(asked.references)
    asked = await _with_items(services, caller, asked, earlier, adapter_ids)
    # The length of stored items is not known, so they always count as long.
    size = MAX_TOKENISED_AT_ONCE + 1 if earlier or refers else len(sent)
    chat = await services.compute_if_long(size, chat_of, asked, earlier)
    chat = chat.model_copy(update={"earlier_adapter_ids": tuple(adapter_ids)})
    return Received(request_id_of(request), chat, max(size, len(sent)))


def read_line(document: Document) -> ResponseChat:
    """Validate the body of a batch's line. Raises InvalidRequest if it names stored objects."""
    asked = read_response_request(document)
    if asked.previous_response_id is not None:
        raise InvalidRequest(
            "a line of a batch cannot continue a stored response: send the items of the earlier turns in input",
            param="previous_response_id",
            code="unsupported_parameter",
        )
    if asked.conversation is not None:
        raise InvalidRequest(
            "a line of a batch cannot continue a conversation: send its items in input",
            param="conversation",
            code="unsupported_parameter",
        )
    if asked.background:
        raise InvalidRequest(
            "a line of a batch cannot be a response in the background",
            param="background",
            code="unsupported_parameter",
        )
    for index, _ in asked.references:
        raise _no_item(index)
    return chat_of(asked)


async def _earlier(
    services: GatewayServices, caller: Principal, asked: ResponseRequest, adapter_ids: set[str | None]
) -> list[InputItem]:
    """Return the items of the conversation or of the previous response's, and add their adapters to `adapter_ids`.

    Raises InvalidRequest, NotFound or PermissionDenied.
    """
    if asked.conversation is not None:
        return await _conversation_items(services, caller, asked, asked.conversation, adapter_ids)
    if asked.previous_response_id is None:
        return []
    missing = NotFound(
        "there is no such stored response: send the items of the earlier turns in input",
        param="previous_response_id",
        code="previous_response_not_found",
    )
    found = await find_response(services, caller, asked.previous_response_id, missing)
    if found.is_unfinished:
        raise InvalidRequest(
            "the previous response is not finished", param="previous_response_id", code="response_not_finished"
        )
    adapter_ids.update(found.adapter_ids)
    return await services.compute(read_items, [*found.input, *found.response["output"]])


async def _conversation_items(
    services: GatewayServices,
    caller: Principal,
    asked: ResponseRequest,
    conversation_id: str,
    adapter_ids: set[str | None],
) -> list[InputItem]:
    missing = NotFound("there is no such conversation", param="conversation", code="conversation_not_found")
    found = await find_conversation(services, caller, conversation_id, missing)
    num_new = 1 + (1 if isinstance(asked.input, str) else len(asked.input))
    if found.num_items + num_new > MAX_ITEMS or found.num_bytes > MAX_BYTES:
        raise InvalidRequest(
            f"the conversation is longer than {MAX_ITEMS} items or {MAX_BYTES} bytes: delete items, or begin another",
            param="conversation",
            code="conversation_full",
        )
    adapter_ids.update(found.adapter_ids)
    items = await services.call(services.stored.conversations.items, found)
    return await services.compute(read_items, items)


async def _with_items(
    services: GatewayServices,
    caller: Principal,
    asked: ResponseRequest,
    earlier: Sequence[InputItem],
    adapter_ids: set[str | None],
) -> ResponseRequest:
    """Replace references by the items that they refer to: earlier items, or items of the tenant's stored objects, whose
    adapters are added to `adapter_ids`.

    Raises InvalidRequest, NotFound or PermissionDenied.
    """
    references = asked.references
    if not references:
        return asked
    sizes: dict[str | None, int] = {}
    named = {reference.id for _, reference in references}
    found: dict[str | None, Any] = {item.id: item for item in earlier if item.id in named}
    loaded: set[str] = set()
    # A stored response has the items that it continued, so the newest usually has all items.
    for index, reference in reversed(references):
        home = home_of(reference.id)
        if reference.id in found or home in loaded:
            continue
        if len(loaded) == MAX_REFERENCED:
            raise InvalidRequest(
                f"the items must be those of at most {MAX_REFERENCED} responses and conversations", param="input"
            )
        loaded.add(home)
        items = await _stored_items(services, caller, home, _no_item(index))
        adapter_ids.update(items.adapter_ids)
        await services.compute(_add_named, items.documents, named, found, sizes)
    await services.compute(_measure, found, sizes)
    replaced: list[Any] = [*asked.input]
    num_characters = 0
    for index, reference in references:
        if reference.id not in found:
            raise _no_item(index)
        # An item counts as often as it is named, because it is rendered as often.
        num_characters += sizes[reference.id]
        _check_length(num_characters)
        replaced[index] = found[reference.id]
    return asked.model_copy(update={"input": replaced})


def _add_named(
    documents: list[Document], named: Container[str], found: dict[str | None, Any], sizes: dict[str | None, int]
) -> None:
    """Add the named items to `found` and measure them. Raises InvalidRequest once they are too long together."""
    for item in read_items(documents):
        if item.id in named:
            found.setdefault(item.id, item)
    _measure(found, sizes)


def _measure(found: Mapping[str | None, Any], sizes: dict[str | None, int]) -> None:
    num_characters = sum(sizes.values())
    for item_id, item in found.items():
        if item_id not in sizes:
            sizes[item_id] = len(item.model_dump_json(warnings=False))
            num_characters += sizes[item_id]
            _check_length(num_characters)


def _check_length(num_characters: int) -> None:
    if num_characters > MAX_BYTES:
        raise InvalidRequest(
            f"the items that input refers to must not exceed {MAX_BYTES} characters in total", param="input"
        )


@dataclass(frozen=True, slots=True)
class _StoredItems:
    documents: list[Document]
    adapter_ids: Sequence[str | None]


async def _stored_items(services: GatewayServices, caller: Principal, home: str, missing: NotFound) -> _StoredItems:
    try:
        response = await find_response(services, caller, f"resp_{home}", missing)
    except NotFound:
        conversation = await find_conversation(services, caller, f"conv_{home}", missing)
        items = await services.call(services.stored.conversations.items, conversation)
        return _StoredItems(items, conversation.adapter_ids)
    return _StoredItems([*response.input, *response.response["output"]], response.adapter_ids)


def _no_item(index: int) -> NotFound:
    return NotFound(
        "no stored response or conversation has such an item: send the item itself. Set store: false in clients that "
        "refer to all earlier items, such as Vercel's AI SDK",
        param=f"input[{index}].id",
        code="item_not_found",
    )
