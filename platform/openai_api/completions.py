"""`POST /v1/completions`: authenticate, resolve, tokenise, reserve, run, answer, settle."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from loramux.platform.openai_api.authentication import Caller, Services
from loramux.platform.openai_api.completion_answer import CompletionAnswer
from loramux.platform.openai_api.error_responses import request_id_of
from loramux.platform.openai_api.openapi import GENERATION_ERRORS, answers, errors, takes
from loramux.platform.openai_api.openapi_schemas import CompletionDocument
from loramux.platform.openai_api.planning import Prompts, check_token_ids, make_plan, resolve
from loramux.platform.openai_api.request_body import parse_body_on, read_body
from loramux.platform.openai_api.schemas import CompletionRequest
from loramux.platform.openai_api.serving import serve

DEFAULT_MAX_TOKENS = 16

router = APIRouter()


@router.post(
    "/v1/completions",
    tags=["inference"],
    openapi_extra=takes(CompletionRequest),
    responses={**answers(CompletionDocument), **errors(*GENERATION_ERRORS)},
)
async def create_completion(request: Request, caller: Caller, services: Services) -> Response:
    """Continue one or several prompts, each a text or token ids, whole or as a stream of server-sent events."""
    sent = await read_body(request, services.settings.max_body_bytes)
    body = await parse_body_on(services.compute, sent, CompletionRequest)
    body.check()
    target = await resolve(services, caller, body)

    def tokenise() -> Prompts:
        return tuple(
            services.tokenizer.encode(prompt, services.max_model_len)
            if isinstance(prompt, str)
            else check_token_ids(prompt, services.model.vocab_size)
            for prompt in body.prompt
        )

    def echoes() -> list[str]:
        """The prompt of each choice as text."""
        tokenizer = services.tokenizer
        texts = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in body.prompt]
        return [text for text in texts for _ in range(body.num_choices)]

    request_id = request_id_of(request)
    plan = await make_plan(
        services,
        request_id,
        caller,
        target,
        body,
        endpoint="completions",
        prompt_param="prompt",
        num_prompts=len(body.prompt),
        num_bytes=len(sent),
        tokenise=tokenise,
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        num_logprobs=body.logprobs,
    )
    answer = CompletionAnswer(
        id=f"cmpl-{request_id.removeprefix('req_')}",
        model=body.model,
        created_s=int(time.time()),
        tokenizer=services.tokenizer,
        has_logprobs=body.logprobs is not None,
        include_usage=body.include_usage,
        echoes=await services.compute(echoes) if body.echo else (),
    )
    return await serve(request, services, plan, answer, stream=bool(body.stream), include_usage=body.include_usage)
