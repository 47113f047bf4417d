"""`POST /v1/chat/completions`: authenticate, resolve, tokenise, reserve, run, answer, settle."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.platform.openai_api.authentication import Caller, Services
from loramux.platform.openai_api.chat_answer import ChatAnswer
from loramux.platform.openai_api.error_responses import request_id_of
from loramux.platform.openai_api.openapi import GENERATION_ERRORS, answers, errors, takes
from loramux.platform.openai_api.openapi_schemas import ChatDocument
from loramux.platform.openai_api.planning import Prompts, make_plan, resolve
from loramux.platform.openai_api.request_body import parse_body_on, read_body
from loramux.platform.openai_api.schemas import ChatMessage, ChatRequest
from loramux.platform.openai_api.serving import serve

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    tags=["inference"],
    openapi_extra=takes(ChatRequest),
    responses={**answers(ChatDocument), **errors(*GENERATION_ERRORS)},
)
async def create_chat_completion(request: Request, caller: Caller, services: Services) -> Response:
    """Answer a conversation, whole or as a stream of server-sent events."""
    sent = await read_body(request, services.settings.max_body_bytes)
    body = await parse_body_on(services.compute, sent, ChatRequest)
    body.check()
    target = await resolve(services, caller, body)

    def tokenise() -> Prompts:
        messages = [_message(message) for message in body.messages]
        return (services.tokenizer.encode_chat(messages, services.max_model_len),)

    request_id = request_id_of(request)
    plan = await make_plan(
        services,
        request_id,
        caller,
        target,
        body,
        endpoint="chat",
        prompt_param="messages",
        num_prompts=1,
        num_bytes=len(sent),
        tokenise=tokenise,
        max_tokens=body.token_limit,
        default_max_tokens=None,
        num_logprobs=body.num_logprobs,
    )
    answer = ChatAnswer(
        id=f"chatcmpl-{request_id.removeprefix('req_')}",
        model=body.model,
        created_s=int(time.time()),
        tokenizer=services.tokenizer,
        has_logprobs=bool(body.logprobs),
        include_usage=body.include_usage,
    )
    return await serve(request, services, plan, answer, stream=bool(body.stream), include_usage=body.include_usage)


def _message(message: ChatMessage) -> dict[str, str]:
    # OpenAI's newer name for the system role; templates know the older one.
    role = "system" if message.role == "developer" else message.role
    shown = {"role": role, "content": message.content}
    return {**shown, "name": message.name} if message.name is not None else shown
