"""`POST /v1/chat/completions`: turns a conversation into one prompt. `request_life.py` runs it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.platform.bodies.chat_request import ChatRequest
from loramux.platform.bodies.request_body import validated
from loramux.platform.generation.plan import Target
from loramux.platform.openai_api.chat_answer import ChatAnswer
from loramux.platform.openai_api.chunks import chunked
from loramux.platform.openai_api.openapi_schemas import ChatDocument
from loramux.platform.openai_api.stored_chat_answer import keep_chat, stored_if_asked
from loramux.platform.requests.answers import Answer
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.chat_preparation import constrain_chat, prepare_chat
from loramux.platform.requests.endpoint import Endpoint, Prepared, Received
from loramux.platform.requests.openapi import GENERATION_ERRORS, answers, errors, takes
from loramux.platform.requests.request_life import serve
from loramux.platform.requests.services import GatewayServices
from loramux.platform.tool_calls.parsers import parser_factory

router = APIRouter(tags=["inference"], responses=errors(*GENERATION_ERRORS))


@router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest), responses=answers(ChatDocument))
async def create_chat_completion(request: Request, caller: Caller, services: Services) -> Response:
    """Complete a conversation, in one response or as a stream of server-sent events."""
    return await serve(request, services, caller, CHAT)


async def _shape(
    services: GatewayServices, target: Target, received: Received[ChatRequest], prepared: Prepared
) -> Answer:
    body = received.body
    echoes = [body.echoed] * body.num_choices if body.echoed else []
    shown = chunked(chat_answer(services, target, received, prepared, echoes), body, prepared.prompts)
    return await stored_if_asked(shown, services, target, received)


def chat_answer(
    services: GatewayServices,
    target: Target,
    received: Received[ChatRequest],
    prepared: Prepared,
    echoes: Sequence[str],
) -> ChatAnswer:
    """Build the documents of an answer whose choices repeat `echoes`. There are none if `echoes` is empty."""
    body, tool_format = received.body, prepared.tool_format
    hides_reasoning = body.include_reasoning is False and prepared.reasoning is not None
    return ChatAnswer(
        id=f"chatcmpl-{received.request_id.removeprefix('req_')}",
        model=body.model,
        created_s=int(time.time()),
        tokenizer=target.tokenizer,
        has_logprobs=body.has_logprobs and not hides_reasoning,
        include_usage=body.include_usage,
        tool_choice=body.choice_of_tools,
        service_tier=target.tiers.tier(body.service_tier),
        new_parser=parser_factory(tool_format, body.argument_schemas),
        note_call=None if tool_format is None else services.metrics.api.tool_calls.labels(tool_format).inc,
        prompt_token_ids=prepared.prompts[0] if body.return_token_ids else None,
        num_prompt_logprobs=body.num_alternatives("prompt_logprobs"),
        names_tokens_by_id=bool(body.return_tokens_as_token_ids),
        hides_reasoning=hides_reasoning,
        fingerprint=target.model.fingerprint,
        echoes=echoes,
    )


CHAT = Endpoint(
    name="chat",
    parse=partial(validated, model=ChatRequest),
    prepare=prepare_chat,
    constraint=constrain_chat,
    shape=_shape,
    keep=keep_chat,
)
