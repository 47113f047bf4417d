"""`POST /v1/chat/completions/batch`: completes several conversations in one request, as in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from loramux.platform.bodies.chat_request import MAX_MESSAGES, ChatRequest
from loramux.platform.bodies.conversation import ChatMessage
from loramux.platform.bodies.prompts import MAX_PROMPTS
from loramux.platform.bodies.request_body import validated
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.choice import ChoiceDelta
from loramux.platform.generation.generation import Usage
from loramux.platform.generation.plan import Target
from loramux.platform.openai_api.chat import chat_answer
from loramux.platform.openai_api.chunks import ChunkedAnswer, chunked
from loramux.platform.openai_api.openapi_schemas import ChatDocument
from loramux.platform.requests.answers import Document
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.chat_preparation import constrain_chat, prepare_chat
from loramux.platform.requests.endpoint import Endpoint, Prepared, Received
from loramux.platform.requests.openapi import GENERATION_ERRORS, errors, takes
from loramux.platform.requests.request_life import serve
from loramux.platform.requests.services import GatewayServices

REFUSED = ("stream", "tools", "prompt_logprobs")
"""Fields of a chat request that a batch cannot have."""

router = APIRouter(tags=["inference"], responses=errors(*GENERATION_ERRORS))

EXAMPLE = {
    "model": "acme/support",
    "messages": [[{"role": "user", "content": f"What is the capital of {land}?"}] for land in ("France", "Japan")],
}

Conversation = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class BatchChatRequest(ChatRequest):
    """A chat request with several conversations, each of which is completed with the same settings."""

    messages: Annotated[  # type: ignore[assignment]
        list[Conversation], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)
    ]

    @property
    def num_prompts(self) -> int:
        return len(self.messages)

    @property
    def conversations(self) -> list[ChatRequest]:
        """A request for each conversation. The body has been validated."""
        # Several conversations have no drafts from a prediction (see `Plan`), so it need not be tokenised for each.
        fields = {**dict(self), "prediction": None}
        return [ChatRequest.model_construct(**{**fields, "messages": messages}) for messages in self.messages]

    def check(self) -> None:
        ChatRequest.check(self)
        for name in REFUSED:
            if getattr(self, name):
                raise InvalidRequest(f"a batch cannot have {name}", param=name, code="unsupported_parameter")


@router.post(
    "/v1/chat/completions/batch", openapi_extra=takes(BatchChatRequest, example=EXAMPLE), response_model=ChatDocument
)
async def create_batch_chat_completion(request: Request, caller: Caller, services: Services) -> Response:
    """Complete several conversations. `messages` is a list of conversations, and the choices are in their order. With
    `n`, each conversation has that many choices.
    """
    return await serve(request, services, caller, BATCH_CHAT)


async def _prepare(services: GatewayServices, target: Target, received: Received[BatchChatRequest]) -> Prepared:
    conversations = received.body.conversations
    num_bytes = received.num_bytes // len(conversations)
    prepared = [
        await prepare_chat(services, target, Received(received.request_id, conversation, num_bytes))
        for conversation in conversations
    ]
    # All answers of a request are parsed in the same way.
    if len(set(map(_reading, prepared))) > 1:
        raise InvalidRequest(
            "the answers of these conversations begin at different places of their reasoning: send separate requests",
            param="messages",
        )
    return replace(prepared[0], prompts=tuple(prompt for one in prepared for prompt in one.prompts))


def _reading(prepared: Prepared) -> tuple[Any, ...]:
    """How an answer is parsed."""
    channels = prepared.channels
    return prepared.reasoning, None if channels is None else channels.place


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAnswer(ChunkedAnswer):
    """An answer whose prompts have no place in the document."""

    def whole(self, deltas: Sequence[ChoiceDelta], usage: Usage) -> Document:
        return {**ChunkedAnswer.whole(self, deltas, usage), "prompt_token_ids": None}


async def _shape(
    services: GatewayServices, target: Target, received: Received[BatchChatRequest], prepared: Prepared
) -> BatchAnswer:
    body = received.body
    echoes = [one.echoed for one in body.conversations for _ in range(body.num_choices)] if body.echo else []
    answer = chunked(chat_answer(services, target, received, prepared, echoes), body, prepared.prompts)
    return BatchAnswer(documents=answer.documents, include_usage=answer.include_usage, so_far=answer.so_far)


BATCH_CHAT = Endpoint(
    name="chat",
    parse=partial(validated, model=BatchChatRequest),
    prepare=_prepare,
    constraint=constrain_chat,
    shape=_shape,
)
