"""Turns the prompts of a pooled request into a plan, and checks the limits on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from loramux.adapter_store.formats.version_files.adapter_task import AdapterTask
from loramux.engine.protocol.messages import SamplingParams
from loramux.engine.text.truncation import Truncation
from loramux.platform.errors import InvalidRequest, context_exceeded
from loramux.platform.generation.plan import Plan, Target, TextRules
from loramux.platform.pooling_api.pooled_request import AnyPrompts, InputFields, PooledFields
from loramux.platform.requests.chat_preparation import render_chat
from loramux.platform.requests.endpoint import Prompts, Received
from loramux.platform.requests.planning import check_generates, end_user_label
from loramux.platform.requests.request_life import activated
from loramux.platform.requests.services import GatewayServices
from loramux.platform.telemetry.tracing import traced

MAX_EXPANSION = 4
"""Maximum number of characters of all texts and pairs, as a multiple of the largest body."""


@dataclass(frozen=True, slots=True)
class TextPair:
    """Two texts that become one prompt, as the tokenizer joins a pair."""

    first: str
    second: str


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A conversation that the chat template has made a prompt, with its special tokens."""

    text: str


Text: TypeAlias = str | tuple[int, ...] | TextPair | RenderedChat
"""A prompt, as text, as token ids, as a pair of texts, or as a rendered conversation."""


async def prompts_plan(
    services: GatewayServices,
    name: str,
    target: Target,
    received: Received[AnyPrompts],
    pooling: str,
    num_labels: int | None = None,
) -> Plan:
    """Return the plan of a request of the endpoint `name` that pools the prompts of its body, or its conversation.

    Raises InvalidRequest, RateLimited or Unavailable.
    """
    body = received.body
    if isinstance(body, InputFields):
        return await pooled_plan(services, name, target, received, body.input, pooling, "input", num_labels)
    prompt = await render_chat(services, target, body.chat, received.num_bytes)
    texts = (RenderedChat(prompt.text),)
    return await pooled_plan(services, name, target, received, texts, pooling, "messages", num_labels)


async def pooled_plan(
    services: GatewayServices,
    name: str,
    target: Target,
    received: Received[PooledFields],
    texts: Sequence[Text],
    pooling: str,
    param: str,
    num_labels: int | None = None,
    names: Sequence[str] | None = None,
) -> Plan:
    """Return the plan of a request of the endpoint `name` that pools each of `texts`.

    Errors name the field `param`, or for one text its place in the body, which is in `names` if the texts are not those
    of `param`, in order. With `num_labels`, the prompts are classified by the head of the model's adapter.
    Raises InvalidRequest.
    """
    if num_labels is None:
        check_generates(target)
    body = received.body
    truncation = body.truncation(services.max_model_len)
    if names is None:
        names = [param] if len(texts) == 1 else [f"{param}[{index}]" for index in range(len(texts))]
    check_text_sizes(services, texts, param)
    # A template can make a short body a long prompt.
    size = max(received.num_bytes, sum(map(_num_characters, texts)))
    with traced("tokenise"):
        prompts = await services.compute_if_long(size, _encoded, services, target, body, truncation, texts, names)
    _check(services, prompts, names, param)
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
        service_tier=target.tiers.tier(None),
        priority=body.priority or 0,
        pooling=pooling,
        num_labels=num_labels,
    )


def check_text_sizes(services: GatewayServices, texts: Sequence[Text], param: str) -> None:
    """Raise InvalidRequest if the texts together are much longer than a body can be.

    A text that is scored against many others is repeated for each of them, and all are tokenised.
    """
    most = MAX_EXPANSION * services.settings.max_body_bytes
    if sum(map(_num_characters, texts)) > most:
        raise InvalidRequest(f"the texts and pairs must not exceed {most} characters in total", param=param)


def _num_characters(text: Text) -> int:
    if isinstance(text, TextPair):
        return len(text.first) + len(text.second)
    return len(text.text) if isinstance(text, RenderedChat) else len(text)


def classifier_of(target: Target) -> AdapterTask | None:
    """Return the task of a model that is a classifier, or None."""
    adapter = target.model.adapter
    task = None if adapter is None else adapter.task
    return task if task is not None and task.kind == "classification" else None


def _encoded(
    services: GatewayServices,
    target: Target,
    body: PooledFields,
    truncation: Truncation | None,
    texts: Sequence[Text],
    names: Sequence[str],
) -> Prompts:
    longest = services.max_model_len if truncation is None else None
    named = zip(texts, names, strict=True)
    return tuple(_ids(target, body, text, longest, truncation, _field(name)) for text, name in named)


def _field(name: str) -> str:
    """Return the field of a place such as `documents[1]`."""
    return name.partition("[")[0]


def _ids(
    target: Target, body: PooledFields, text: Text, longest: int | None, truncation: Truncation | None, param: str
) -> tuple[int, ...]:
    tokenizer = target.tokenizer
    if isinstance(text, RenderedChat):
        # As in vLLM, the template writes the special tokens, unless the body asks for those of a plain prompt.
        adds_special_tokens = bool(body.add_special_tokens)
        return tokenizer.encode_rendered(
            text.text, longest, add_special_tokens=adds_special_tokens, truncation=truncation
        )
    adds_special_tokens = body.add_special_tokens is not False
    if isinstance(text, str):
        return tokenizer.encode(
            text, longest, add_special_tokens=adds_special_tokens, param=param, truncation=truncation
        )
    if isinstance(text, TextPair):
        return tokenizer.encode_pair(
            text.first,
            text.second,
            longest,
            add_special_tokens=adds_special_tokens,
            param=param,
            truncation=truncation,
        )
    if not all(token < target.vocab_size for token in text):
        raise InvalidRequest(f"token ids must be from 0 to {target.vocab_size - 1}", param=param)
    return text if truncation is None else truncation.kept(text)


def _check(services: GatewayServices, prompts: Prompts, names: Sequence[str], param: str) -> None:
    most = services.max_model_len
    for where, prompt in zip(names, prompts, strict=True):
        if not prompt:
            raise InvalidRequest(f"{where} has no tokens", param=_field(where))
        if len(prompt) > most:
            raise context_exceeded(most, f"{where} has {len(prompt)}", _field(where))
    total, most = sum(map(len, prompts)), services.settings.max_request_tokens
    if total > most:
        raise InvalidRequest(f"{param} has {total} tokens in total, but at most {most} are allowed", param=param)
