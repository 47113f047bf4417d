"""`POST /v1/completions`: takes one or more prompts, as text or token ids. `request_life.py` runs them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.engine.text.detokenizer import echoed_text
from loramux.platform.bodies.request_body import validated
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.plan import Target
from loramux.platform.grammars.constraint import Constraint
from loramux.platform.openai_api.chunks import ChunkedAnswer, chunked
from loramux.platform.openai_api.completion_answer import CompletionAnswer
from loramux.platform.openai_api.completion_request import CompletionRequest
from loramux.platform.openai_api.openapi_schemas import CompletionDocument
from loramux.platform.requests.authentication import Caller, Services
from loramux.platform.requests.endpoint import Endpoint, Prepared, Prompts, Received, longest_prompt
from loramux.platform.requests.openapi import GENERATION_ERRORS, answers, errors, takes
from loramux.platform.requests.request_life import serve
from loramux.platform.requests.services import GatewayServices

T = TypeVar("T")

router = APIRouter(tags=["inference"], responses=errors(*GENERATION_ERRORS))


@router.post("/v1/completions", openapi_extra=takes(CompletionRequest), responses=answers(CompletionDocument))
async def create_completion(request: Request, caller: Caller, services: Services) -> Response:
    """Complete one or more prompts (text or token ids), in one response or as a stream of server-sent events."""
    return await serve(request, services, caller, COMPLETIONS)


async def _prepare(services: GatewayServices, target: Target, received: Received[CompletionRequest]) -> Prepared:
    return Prepared(await services.compute_if_long(received.num_bytes, _encoded, services, target, received.body))


def _encoded(services: GatewayServices, target: Target, body: CompletionRequest) -> Prompts:
    longest = longest_prompt(services, body)
    return tuple(
        target.tokenizer.encode(prompt, longest) if isinstance(prompt, str) else _known(prompt, target.vocab_size)
        for prompt in body.prompt
    )


def _constraint(target: Target, body: CompletionRequest, prepared: Prepared) -> Constraint | None:
    return body.constraint()


async def _shape(
    services: GatewayServices, target: Target, received: Received[CompletionRequest], prepared: Prepared
) -> ChunkedAnswer:
    body = received.body
    documents = CompletionAnswer(
        id=f"cmpl-{received.request_id.removeprefix('req_')}",
        model=body.model,
        created_s=int(time.time()),
        tokenizer=target.tokenizer,
        has_logprobs=body.has_logprobs,
        include_usage=body.include_usage,
        service_tier=target.tiers.tier(body.service_tier),
        num_choices=body.num_choices,
        num_generated=body.num_generated,
        num_alternatives=body.num_alternatives("logprobs") or 0,
        num_prompt_logprobs=body.num_alternatives("prompt_logprobs"),
        names_tokens_by_id=bool(body.return_tokens_as_token_ids),
        prompts=_for_each_choice(body, prepared.prompts),
        echoes_logprobs=body.echoes_logprobs,
        skips_special_tokens=body.text_rules().skip_special_tokens,
        fingerprint=target.model.fingerprint,
        shows_token_ids=bool(body.return_token_ids),
        echoes=await services.compute(_echoes, target, body, prepared.prompts) if body.echo else (),
    )
    return chunked(documents, body, prepared.prompts)


COMPLETIONS = Endpoint(
    name="completions",
    parse=partial(validated, model=CompletionRequest),
    prepare=_prepare,
    constraint=_constraint,
    shape=_shape,
)


def _known(prompt: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    if not all(token < vocab_size for token in prompt):
        raise InvalidRequest(f"token ids must be from 0 to {vocab_size - 1}", param="prompt")
    return prompt


def _echoes(target: Target, body: CompletionRequest, prompts: Prompts) -> list[str]:
    rules, tokenizer = body.text_rules(), target.tokenizer
    # The tokens after a prompt can complete its last character.
    decoded = tokenizer.decode if rules.only_prompt else partial(echoed_text, tokenizer)
    texts = [
        given
        if isinstance(given, str) and body.truncate_prompt_tokens is None
        else decoded(prompt, skip_special_tokens=rules.skip_special_tokens)
        for given, prompt in zip(body.prompt, prompts, strict=True)
    ]
    return _for_each_choice(body, texts)


def _for_each_choice(body: CompletionRequest, prompts: Iterable[T]) -> list[T]:
    return [prompt for prompt in prompts for _ in range(body.num_choices)]
