"""`POST /v1/messages` and `POST /v1/messages/count_tokens`: a body becomes a chat request, and its answer blocks."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.platform.bodies.request_body import parse_body_on, read_body, validated
from loramux.platform.generation.plan import Target
from loramux.platform.messages_api.api_version import check_version
from loramux.platform.messages_api.message_answer import MessageAnswer
from loramux.platform.messages_api.message_blocks import BlockEvents
from loramux.platform.messages_api.message_documents import (
    VERSION_PARAMETER,
    MessageDocument,
    TokenCountDocument,
    message_errors,
)
from loramux.platform.messages_api.message_request import CountTokensRequest, MessagesChat, MessagesRequest
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.chat_preparation import constrain_chat, prepare_chat
from loramux.platform.requests.endpoint import Endpoint, Prepared, Received
from loramux.platform.requests.error_responses import json_response, request_id_of
from loramux.platform.requests.openapi import answers, takes
from loramux.platform.requests.request_life import prepare, resolve, serve
from loramux.platform.requests.services import GatewayServices
from loramux.platform.tool_calls.parsers import parser_factory

router = APIRouter(tags=["messages"], responses=message_errors())


@router.post(
    "/v1/messages",
    openapi_extra={**takes(MessagesRequest), "parameters": [VERSION_PARAMETER]},
    responses=answers(MessageDocument, "message_start"),
)
async def create_message(request: Request, caller: Caller, services: Services) -> Response:
    """Continue a conversation, as in Anthropic's Messages API, in one response or as a stream of server-sent events."""
    check_version(request.headers)
    return await serve(request, services, caller, MESSAGES)


@router.post(
    "/v1/messages/count_tokens",
    openapi_extra={**takes(CountTokensRequest), "parameters": [VERSION_PARAMETER]},
    response_model=TokenCountDocument,
)
async def count_tokens(request: Request, caller: Caller, services: Services) -> Response:
    """Count the tokens of a conversation's prompt, without running it. No quota is charged."""
    check_version(request.headers)
    sent = await read_body(request, services.settings.max_body_bytes)
    body = await parse_body_on(services.compute, sent, _counted)
    target = await resolve(services, caller, body.model)
    prepared = await prepare(services, MESSAGES, target, Received(request_id_of(request), body, len(sent)))
    return json_response({"input_tokens": len(prepared.prompts[0])})


def _asked(document: dict[str, Any]) -> MessagesChat:
    return validated(document, MessagesRequest).chat()


def _counted(document: dict[str, Any]) -> MessagesChat:
    return validated(document, CountTokensRequest).chat()


async def _shape(
    services: GatewayServices, target: Target, received: Received[MessagesChat], prepared: Prepared
) -> MessageAnswer:
    body, tool_format, [prompt] = received.body, prepared.tool_format, prepared.prompts
    new_parser = parser_factory(tool_format, body.argument_schemas)
    blocks = BlockEvents(
        None if new_parser is None else new_parser(),
        services.metrics.api.tool_calls.labels(tool_format).inc if tool_format is not None else lambda: None,
        hides_thinking=not body.include_reasoning,
        omits_thinking=body.omits_thinking,
    )
    is_clipped = (body.max_tokens or 0) > services.max_model_len - len(prompt)
    tier = target.tiers.tier(body.service_tier)
    return MessageAnswer(received.request_id, body.model, len(prompt), blocks, tier, is_clipped=is_clipped)


MESSAGES = Endpoint(name="messages", parse=_asked, prepare=prepare_chat, constraint=constrain_chat, shape=_shape)
