"""Turns the prompts of a pooled request into a plan, and checks the limits on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from loramux.adapter_store.formats.version_files.adapter_task import AdapterTask
from loramux.engine.protocol.messages import SamplingParams
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.plan import Plan, Target, TextRules
from loramux.platform.pooling_api.pooled_request import PooledRequest
from loramux.platform.requests.endpoint import Prompts, Received
from loramux.platform.requests.planning import check_generates, end_user_label
from loramux.platform.requests.request_life import activated
from loramux.platform.requests.services import GatewayServices
from loramux.platform.telemetry.tracing import traced


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that become one prompt, as the tokenizer joins a pair."""

    first: str
    second: str


Text: TypeAlias = str | tuple[int, ...] | TextPair
"""A prompt, as text, as token ids, or as a pair of texts."""


async def pooled_plan(
    services: GatewayServices,
    name: str,
    target: Target,
    received: Received[PooledRequest],
    texts: Sequence[Text],
    pooling: str,
    param: str = "input",
    num_labels: int | None = None,
) -> Plan:
    """Return the plan of a request of the endpoint `name` that pools each of `texts`.

    Errors name the field `param`. With `num_labels`, the prompts are classified by the head of the model's adapter.
    Raises InvalidRequest.
    """
    if num_labels is None:
        check_generates(target)
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
        num_labels=num_labels,
    )


def classifier_of(target: Target) -> AdapterTask | None:
    """Return the task of a model that is a classifier, or None."""
    adapter = target.model.adapter
    task = None if adapter is None else adapter.task
    return task if task is not None and task.kind == "classification" else None


def _encoded(
    services: GatewayServices,
    target: Target,
    body: PooledRequest,
    texts: Sequence[Text],
    param: str,
) -> Prompts:
    longest = services.max_model_len if body.truncate_prompt_tokens is None else None
    return tuple(_kept(services, body, _ids(target, body, text, longest, param)) for text in texts)


def _ids(target: Target, body: PooledRequest, text: Text, longest: int | None, param: str) -> tuple[int, ...]:
    adds_special_tokens = body.add_special_tokens is not False
    if isinstance(text, str):
        return target.tokenizer.encode(text, longest, add_special_tokens=adds_special_tokens, param=param)
    if isinstance(text, TextPair):
        return target.tokenizer.encode_pair(
            text.first, text.second, longest, add_special_tokens=adds_special_tokens, param=param
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
