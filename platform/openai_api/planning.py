"""From a checked body to a plan: the model resolved once, the prompts tokenised, every limit applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from loramux.engine.messages import SamplingParams
from loramux.platform.accounts.end_users import end_user_label
from loramux.platform.accounts.model_names import ResolvedModel
from loramux.platform.accounts.principals import Principal
from loramux.platform.accounts.tenants import Share
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.plan import CHUNK_TOKENS, Plan
from loramux.platform.openai_api.schemas import GenerationRequest
from loramux.platform.openai_api.services import GatewayServices
from loramux.platform.telemetry.tracing import traced
from loramux.platform.tokenizer.model_tokenizer import MAX_TOKENISED_AT_ONCE

Prompts = tuple[tuple[int, ...], ...]

TOKENS_AT_ONCE = 16
"""Tokens of an answer that is sent whole which the engine tells of together: it spares a gateway most of its work."""


@dataclass(frozen=True, slots=True)
class Target:
    """The model that a principal asked for, and the principal's place in the engine."""

    tenant_id: str
    model: ResolvedModel
    share: Share


async def resolve(services: GatewayServices, principal: Principal, body: GenerationRequest) -> Target:
    """The model of a request; its `user` keeps a version of an alias that names several.

    Raises ModelNotFound and PermissionDenied.
    """

    recent = None if principal.tenant_id is None else services.tenants.recent_share(principal.tenant_id)

    def read() -> Target:
        model = services.resolver.resolve(principal, body.model, body.user)
        assert principal.tenant_id is not None
        return Target(principal.tenant_id, model, recent or services.tenants.share(principal.tenant_id))

    with traced("resolve"):
        # The base is found without the database, and so is a share that was read a moment ago: no thread is needed.
        if recent is not None and body.model == services.resolver.served_name:
            return read()
        return await services.call(read)


async def make_plan(
    services: GatewayServices,
    request_id: str,
    principal: Principal,
    target: Target,
    body: GenerationRequest,
    *,
    endpoint: str,
    prompt_param: str,
    num_prompts: int,
    num_bytes: int,
    tokenise: Callable[[], Prompts],
    max_tokens: int | None,
    default_max_tokens: int | None,
    num_logprobs: int | None,
) -> Plan:
    """Tokenise and check; `default_max_tokens` None is the remaining context. Raises InvalidRequest.

    `num_bytes` is the length of the body that holds the prompts.
    """
    n = body.num_choices
    if num_prompts * n > services.settings.max_choices:
        raise InvalidRequest(f"prompts times n may be at most {services.settings.max_choices}", param="n")
    sampling = body.sampling(num_logprobs, services.model.vocab_size)
    with traced("tokenise"):
        prompts = tokenise() if num_bytes <= MAX_TOKENISED_AT_ONCE else await services.compute(tokenise)
    is_asked = max_tokens is not None
    max_tokens = _max_tokens(services.max_model_len, prompts, prompt_param, max_tokens, default_max_tokens)
    # The engine holds each choice as a sequence with a prompt of its own.
    if n * sum(len(prompt) + max_tokens for prompt in prompts) > services.settings.max_request_tokens:
        most = services.settings.max_request_tokens
        raise InvalidRequest(f"n times the tokens of all prompts and max_tokens may be at most {most}", param="n")
    _check_min_tokens(sampling, max_tokens)
    stops = tuple(body.stop or ())
    return Plan(
        request_id=request_id,
        principal=principal,
        tenant_id=target.tenant_id,
        share=target.share,
        model=target.model,
        endpoint=endpoint,
        prompts=prompts,
        num_choices=n,
        max_tokens=max_tokens,
        granted_tokens=max_tokens if is_asked else min(max_tokens, max(CHUNK_TOKENS, sampling.min_tokens)),
        sampling=sampling,
        stops=stops,
        tokens_at_once=1 if body.stream or stops else TOKENS_AT_ONCE,
        base=services.model.served_name,
        end_user=end_user_label(body.user),
    )


def check_token_ids(prompt: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    if not all(token < vocab_size for token in prompt):
        raise InvalidRequest(f"token ids lie in 0 to {vocab_size - 1}", param="prompt")
    return prompt


def _max_tokens(max_model_len: int, prompts: Prompts, prompt_param: str, asked: int | None, default: int | None) -> int:
    """Tokens that each choice may have; raises InvalidRequest when they and the longest prompt do not fit."""
    if not all(prompts):
        raise InvalidRequest("the prompt is empty", param=prompt_param)
    longest = max(len(prompt) for prompt in prompts)
    remaining = max_model_len - longest
    if remaining < 1 or (asked is not None and asked > remaining):
        wanted = "" if asked is None else f" and asks for {asked} more"
        raise InvalidRequest(
            f"This model's maximum context length is {max_model_len} tokens; the prompt has {longest}{wanted}.",
            param=prompt_param if remaining < 1 else "max_tokens",
            code="context_length_exceeded",
        )
    if asked is not None:
        return asked
    return remaining if default is None else min(default, remaining)


def _check_min_tokens(sampling: SamplingParams, max_tokens: int) -> None:
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens exceeds max_tokens, which is {max_tokens}", param="min_tokens")
