"""`POST /v1/chat/completions`: turns a conversation into one prompt. `request_life.py` runs it."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.platform.generation.plan import Reasoning, Target
from loramux.platform.grammars.constraint import Constraint
from loramux.platform.openai_api.authentication import Caller, Services
from loramux.platform.openai_api.chat_answer import ChatAnswer
from loramux.platform.openai_api.chat_constraint import chat_constraint
from loramux.platform.openai_api.chat_prompt import ChatPrompt
from loramux.platform.openai_api.endpoint import Endpoint, Prepared, Received, longest_prompt
from loramux.platform.openai_api.openapi import GENERATION_ERRORS, answers, errors, takes
from loramux.platform.openai_api.openapi_schemas import ChatDocument
from loramux.platform.openai_api.request_life import serve
from loramux.platform.openai_api.schemas import ChatRequest
from loramux.platform.openai_api.services import GatewayServices
from loramux.platform.telemetry.tracing import traced
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tool_calls import harmony
from loramux.platform.tool_calls.harmony import Channels, Harmony
from loramux.platform.tool_calls.parsers import find_parser
from loramux.platform.tool_calls.reasoning import HARMONY

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


async def _prepare(services: GatewayServices, target: Target, received: Received[ChatRequest]) -> Prepared:
    body, settings = received.body, target.settings

    def encoded(prompt: ChatPrompt) -> Prepared:
        limit, adds_special_tokens = longest_prompt(services, body), body.adds_special_tokens
        ids = target.tokenizer.encode_rendered(prompt.text, limit, add_special_tokens=adds_special_tokens)
        return _read_as(prompt, ids, target.tokenizer)

    if settings.template is None:
        return await services.compute_if_long(
            received.num_bytes, lambda: encoded(services.prompts.chat_prompts.render(body, settings.parsers))
        )
    with traced("render"), services.metrics.api.template_seconds.time():
        prompt = await services.prompts.chat_prompts.render_with(target.tenant_id, settings, body)
    return await services.compute_if_long(len(prompt.text), encoded, prompt)


def _read_as(prompt: ChatPrompt, ids: tuple[int, ...], tokenizer: ModelTokenizer) -> Prepared:
    """Decide how to parse the answer. Channels need the model's special tokens, so without them nothing is parsed."""
    reasoning, tool_format = prompt.reasoning, prompt.tool_format
    has_reasoning, has_calls = reasoning is not None and reasoning.markers is HARMONY, tool_format == harmony.NAME
    if not has_reasoning and not has_calls:
        return Prepared((ids,), reasoning, tool_format)
    found = Harmony.of(tokenizer.special_token_id, tokenizer.token_bytes)
    if found is None:
        return Prepared((ids,))
    place = found.end_of(ids)
    channels = Channels(format=found, place=place, has_reasoning=has_reasoning, has_calls=has_calls)
    if has_reasoning:
        reasoning = Reasoning(HARMONY, is_open=place.message is not None and place.message.channel == harmony.ANALYSIS)
    return Prepared((ids,), reasoning if has_reasoning else None, tool_format if has_calls else None, channels)


def _constraint(target: Target, body: ChatRequest, prepared: Prepared) -> Constraint | None:
    return chat_constraint(target.tokenizer, body, prepared)


async def _shape(
    services: GatewayServices, target: Target, received: Received[ChatRequest], prepared: Prepared
) -> ChatAnswer:
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
        new_parser=None if tool_format is None else find_parser(tool_format),
        note_call=None if tool_format is None else services.metrics.api.tool_calls.labels(tool_format).inc,
        prompt_token_ids=prepared.prompts[0] if body.return_token_ids else None,
        num_prompt_logprobs=body.num_alternatives("prompt_logprobs"),
        names_tokens_by_id=bool(body.return_tokens_as_token_ids),
        hides_reasoning=hides_reasoning,
    )


CHAT = Endpoint(name="chat", body=ChatRequest, prepare=_prepare, constraint=_constraint, shape=_shape)
