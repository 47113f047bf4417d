"""`POST /v1/chat/completions`: turns a conversation into one prompt. `request_life.py` runs it."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.platform.openai_api.authentication import Caller, Services
from loramux.platform.openai_api.chat_answer import ChatAnswer
from loramux.platform.openai_api.endpoint import Endpoint, Prompts, Received
from loramux.platform.openai_api.openapi import GENERATION_ERRORS, answers, errors, takes
from loramux.platform.openai_api.openapi_schemas import ChatDocument
from loramux.platform.openai_api.request_life import serve
from loramux.platform.openai_api.schemas import ChatMessage, ChatRequest
from loramux.platform.openai_api.services import GatewayServices

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    tags=["inference"],
    openapi_extra=takes(ChatRequest),
    responses={**answers(ChatDocument), **errors(*GENERATION_ERRORS)},
)
async def create_chat_completion(request: Request, caller: Caller, services: Services) -> Response:
    """Complete a conversation, in one response or as a stream of server-sent events."""
    return await serve(request, services, caller, CHAT)


def _tokenise(services: GatewayServices, body: ChatRequest) -> Prompts:
    messages = [_message(message) for message in body.messages]
    return (services.tokenizer.encode_chat(messages, services.max_model_len),)


async def _shape(services: GatewayServices, received: Received[ChatRequest]) -> ChatAnswer:
    body = received.body
    return ChatAnswer(
        id=f"chatcmpl-{received.request_id.removeprefix('req_')}",
        model=body.model,
        created_s=int(time.time()),
        tokenizer=services.tokenizer,
        has_logprobs=bool(body.logprobs),
        include_usage=body.include_usage,
    )


CHAT = Endpoint(name="chat", body=ChatRequest, tokenise=_tokenise, shape=_shape)


def _message(message: ChatMessage) -> dict[str, str]:
    # "developer" is OpenAI's newer name for the system role; chat templates use the older one.
    role = "system" if message.role == "developer" else message.role
    shown = {"role": role, "content": message.content}
    return {**shown, "name": message.name} if message.name is not None else shown
