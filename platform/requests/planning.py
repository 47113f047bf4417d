"""Turns tokenised prompts into a plan, and checks the limits on the size of a single request."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import msgspec

from loramux.engine.protocol.messages import ThinkingBudget
from loramux.engine.text.end_tokens import end_tokens, ending_at
from loramux.platform.bodies.generation_request import GenerationRequest
from loramux.platform.errors import InvalidRequest, context_exceeded
from loramux.platform.generation.plan import CHUNK_TOKENS, Plan, Target, TextRules
from loramux.platform.requests.endpoint import B, Endpoint, Prepared, Prompts, Received
from loramux.platform.requests.services import GatewayServices

MAX_END_USER = 128
"""Longest end user recorded as given, in characters."""

TOKENS_AT_ONCE = 16
"""Maximum number of tokens per SequenceOutput if the response is not streamed and has no stop strings. Fewer outputs
mean less work for the gateway.
"""


def check_generates(target: Target) -> None:
    """Raise InvalidRequest for a version that has a head for classes in place of the one for tokens."""
    adapter = target.model.adapter
    if adapter is not None and adapter.task is not None and adapter.task.kind == "classification":
        raise InvalidRequest(
            f"{target.model.name} is a classifier: call /classify"
            + (" or /score" if len(adapter.task.labels) == 1 else ""),
            param="model",
            code="wrong_task",
        )


def check_untokenised(services: GatewayServices, target: Target, body: GenerationRequest) -> None:
    """Raise InvalidRequest for errors that can be found before the prompts are tokenised."""
    if body.num_prompts * body.num_generated > services.settings.max_choices:
        raise InvalidRequest(
            f"prompts times {_multiplier(body)} must not exceed {services.settings.max_choices}",
            param=_multiplier(body),
        )
    body.check_vocabulary(target.vocab_size)
    check_truncation(services.max_model_len, body.truncate_prompt_tokens)


def check_truncation(max_model_len: int, truncate_prompt_tokens: int | None) -> None:
    """Raise InvalidRequest if prompts would still exceed the context."""
    if (truncate_prompt_tokens or 0) > max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens must not exceed the context of {max_model_len} tokens. "
            "Please request a smaller truncation size.",
            param="truncate_prompt_tokens",
        )


def truncated(max_model_len: int, body: GenerationRequest, prompts: Prompts) -> Prompts:
    """Return the last `truncate_prompt_tokens` tokens of each prompt, or the first if `truncation_side` is `right`.

    The value -1 leaves room for the answer in the context.
    """
    limit = body.truncate_prompt_tokens
    if limit is None:
        return prompts
    if limit == -1:
        limit = max(1, max_model_len - (body.token_limit or body.DEFAULT_MAX_TOKENS or 1))
    kept = slice(limit) if body.truncation_side == "right" else slice(-limit, None)
    return tuple(prompt[kept] for prompt in prompts)


def make_plan(
    services: GatewayServices,
    endpoint: Endpoint[B],
    received: Received[B],
    target: Target,
    prepared: Prepared,
    grammar: str = "",
) -> Plan:
    body, prompts, defaults = received.body, prepared.prompts, target.settings.defaults
    sampling = msgspec.structs.replace(
        body.sampling(defaults), bad_words=prepared.bad_words, thinking=_thinking(target, body, prepared)
    )
    # Not every generation_config.json lists the token that ends a call.
    finals = () if prepared.channels is None else prepared.channels.format.final_ids
    sampling = ending_at(sampling, (*_end_tokens(target), *finals))
    text_rules = _text_rules(target, body, prepared)
    if not sampling.ignore_eos:
        named = text_rules.stop_token_ids.difference(services.model.eos_token_ids)
        text_rules = replace(text_rules, stop_token_ids=named)
    max_tokens = _max_tokens(services.max_model_len, body, prompts, defaults.max_new_tokens)
    # In the engine, each choice is a sequence with its own copy of the prompt.
    most = services.settings.max_request_tokens
    if body.num_generated * sum(len(prompt) + max_tokens for prompt in prompts) > most:
        raise InvalidRequest(
            f"{_multiplier(body)} times (prompt tokens + max_tokens), summed over all prompts, must not exceed {most}",
            param=_multiplier(body),
        )
    if sampling.min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens exceeds max_tokens, which is {max_tokens}", param="min_tokens")
    is_asked = body.token_limit is not None
    return Plan(
        request_id=received.request_id,
        target=target,
        endpoint=endpoint.name,
        prompts=prompts,
        activations=prepared.activations,
        num_choices=body.num_generated,
        max_tokens=max_tokens,
        granted_tokens=max_tokens if is_asked else min(max_tokens, max(CHUNK_TOKENS, sampling.min_tokens)),
        sampling=sampling,
        grammar=grammar,
        text_rules=text_rules,
        tokens_at_once=1 if body.stream or text_rules.stops else TOKENS_AT_ONCE,
        base=services.model.served_name,
        end_user=end_user_label(body.user),
        service_tier=target.tiers.tier(body.service_tier),
        priority=body.priority or 0,
        speculates=body.speculation is not False,
        prediction=prepared.prediction,
    )


def _end_tokens(target: Target) -> tuple[int, ...]:
    settings = target.settings
    return end_tokens(settings.eos_token_ids, settings.special_tokens, target.tokenizer, target.vocab_size)


def _thinking(target: Target, body: GenerationRequest, prepared: Prepared) -> ThinkingBudget | None:
    """Return the limit on the reasoning, or None if there is no limit or no reasoning."""
    reasoning = prepared.reasoning
    if body.max_thinking_tokens is None or reasoning is None:
        return None
    begin, end = (
        target.tokenizer.encode(marker, add_special_tokens=False)
        for marker in (reasoning.markers.begin, reasoning.markers.end)
    )
    return ThinkingBudget(num_tokens=body.max_thinking_tokens, begin=begin, end=end, is_open=reasoning.is_open)


def _text_rules(target: Target, body: GenerationRequest, prepared: Prepared) -> TextRules:
    """Return the rules for turning tokens into text. Special tokens are shown if they mark calls or reasoning."""
    rules = replace(body.text_rules(), reasoning=prepared.reasoning, channels=prepared.channels)
    tokenizer = target.tokenizer
    tokens = (token for marker in prepared.markers for token in tokenizer.marker_ids(marker))
    if any(tokenizer.special_token_id(token) is not None for token in tokens):
        rules = replace(rules, skip_special_tokens=False)
    return rules


def _multiplier(body: GenerationRequest) -> str:
    return "n" if body.num_generated == body.num_choices else "best_of"


def _max_tokens(max_model_len: int, body: GenerationRequest, prompts: Prompts, max_new_tokens: int | None) -> int:
    """Return the token limit of each choice: the limit in the body if it is set, otherwise the model's `max_new_tokens`
    or the endpoint's default, but no more than the rest of the context.

    Raises InvalidRequest if a prompt is empty, or if the longest prompt leaves no room for the answer.
    """
    if not all(prompts):
        raise InvalidRequest("the prompt is empty", param=body.PROMPT)
    asked, longest = body.token_limit, max(len(prompt) for prompt in prompts)
    remaining = max_model_len - longest
    if remaining < 1 or (asked is not None and asked > remaining and not body.fits_context):
        wanted = "" if asked is None else f" and asks for {asked} more"
        param, instead = (body.PROMPT, "") if remaining < 1 else ("max_tokens", " or max_tokens")
        raise context_exceeded(max_model_len, f"the prompt has {longest}{wanted}", param, instead)
    if asked is not None:
        return min(asked, remaining)
    default = body.DEFAULT_MAX_TOKENS if max_new_tokens is None else max_new_tokens
    return remaining if default is None else min(default, remaining)


def end_user_label(user: str | None) -> str | None:
    """Return the request's `user` as the ledger names it: as given if it is short and printable, otherwise its SHA-256.

    Long names stay distinct, and no request is refused because of its `user`. Without one, return None.
    """
    if not user:
        return None
    if len(user) <= MAX_END_USER and user.isprintable():
        return user
    return f"sha256:{hashlib.sha256(user.encode('utf-8', 'surrogatepass')).hexdigest()}"
