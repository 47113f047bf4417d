"""Turns the prompts of a pooled request into a plan, and checks the limits on them."""

from __future__ import annotations

from collections.abc import Sequence

from loramux.engine.protocol.messages import SamplingParams
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.plan import Plan, Target, TextRules
from loramux.platform.pooling_api.pooled_request import PooledRequest
from loramux.platform.requests.endpoint import Prompts, Received
from loramux.platform.requests.planning import end_user_label
from loramux.platform.requests.request_life import activated
from loramux.platform.requests.services import GatewayServices
from loramux.platform.telemetry.tracing import traced


async def pooled_plan(
    services: GatewayServices,
    name: str,
    target: Target,
    received: Received[PooledRequest],
    texts: Sequence[str | tuple[int, ...]],
    pooling: str,
    param: str = "input",
) -> Plan:
    """Return the plan of a request of the endpoint `name` that pools each of `texts`, given as text or token ids.

    Errors name the field `param`. Raises InvalidRequest.
    """
    body = received.body
    if (body.truncate_prompt_tokens or 0) > services.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens must not exceed the context of {services.max_model_len} tokens",
            param="truncate_prompt_tokens",
        )
    with traced("tokenise"):
        prompts = await services.compute_if_long(received.num_bytes, _encoded, services, target, body, texts, param)
    _check(services, prompts, param)
    return Plan(
        request_id=received.request_id,
        target=target,
        endpoint=name,
        prompts=prompts,
        activations=await activated(services, target, prompts),
        num_choices=1,
        max_tokens=0,
        granted_tokens=0,
        sampling=SamplingParams(),
        grammar="",
        text_rules=TextRules(),
        tokens_at_once=1,
        base=services.model.served_name,
        end_user=end_user_label(body.user),
        priority=body.priority or 0,
        pooling=pooling,
    )


def _encoded(
    services: GatewayServices,
    target: Target,
    body: PooledRequest,
    texts: Sequence[str | tuple[int, ...]],
    param: str,
) -> Prompts:
    longest = services.max_model_len if body.truncate_prompt_tokens is None else None
    return tuple(_kept(services, body, _ids(target, body, text, longest, param)) for text in texts)


def _ids(
    target: Target, body: PooledRequest, text: str | tuple[int, ...], longest: int | None, param: str
) -> tuple[int, ...]:
    if isinstance(text, str):
        return target.tokenizer.encode(
            text, longest, add_special_tokens=body.add_special_tokens is not False, param=param
        )
    if not all(token < target.vocab_size for token in text):
        raise InvalidRequest(f"token ids must be from 0 to {target.vocab_size - 1}", param=param)
    return text


def _kept(services: GatewayServices, body: PooledRequest, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Return the first `truncate_prompt_tokens` tokens, or the last if `truncation_side` is `left`.

    The value -1 stands for the length of the context.
    """
    limit = body.truncate_prompt_tokens
    if limit is None:
        return prompt
    limit = services.max_model_len if limit == -1 else limit
    return prompt[-limit:] if body.truncation_side == "left" else prompt[:limit]


def _check(services: GatewayServices, prompts: Prompts, param: str) -> None:
    most = services.max_model_len
    for index, prompt in enumerate(prompts):
        where = param if len(prompts) == 1 else f"{param}[{index}]"
        if not prompt:
            raise InvalidRequest(f"{where} has no tokens", param=param)
        if len(prompt) > most:
            raise InvalidRequest(
                f"This model's maximum context length is {most} tokens; {where} has {len(prompt)}.",
                param=param,
                code="context_length_exceeded",
            )
    total, most = sum(map(len, prompts)), services.settings.max_request_tokens
    if total > most:
        raise InvalidRequest(f"{param} has {total} tokens in total, but at most {most} are allowed", param=param)
