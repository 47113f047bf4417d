"""Turns a conversation into one prompt, and decides how its answer is constrained and parsed."""

from __future__ import annotations

from dataclasses import replace

from loramux.engine.scheduling.request_limits import MAX_PREDICTION_TOKENS
from loramux.platform.bodies.chat_request import ChatRequest
from loramux.platform.generation.plan import Reasoning, Target
from loramux.platform.grammars.constraint import Constraint
from loramux.platform.requests.chat_constraint import chat_constraint
from loramux.platform.requests.chat_prompt import ChatPrompt
from loramux.platform.requests.endpoint import Prepared, Received, longest_prompt
from loramux.platform.requests.services import GatewayServices
from loramux.platform.telemetry.tracing import traced
from loramux.platform.tokenizer.model_tokenizer import ModelTokenizer
from loramux.platform.tool_calls import harmony
from loramux.platform.tool_calls.harmony import Channels, Harmony
from loramux.platform.tool_calls.reasoning import HARMONY


async def prepare_chat(services: GatewayServices, target: Target, received: Received[ChatRequest]) -> Prepared:
    """Render and tokenise the conversation. Raises InvalidRequest, RateLimited or Unavailable."""
    body = received.body
    prompt = await render_chat(services, target, body, received.num_bytes)

    def encoded() -> Prepared:
        limit, adds_special_tokens = longest_prompt(services, body), body.adds_special_tokens
        ids = target.tokenizer.encode_rendered(prompt.text, limit, add_special_tokens=adds_special_tokens)
        read = _read_as(prompt, ids, target.tokenizer)
        if not prediction:
            return read
        predicted = target.tokenizer.encode(prediction, add_special_tokens=False)[:MAX_PREDICTION_TOKENS]
        return replace(read, prediction=predicted)

    prediction = "" if body.prediction is None else body.prediction.text
    return await services.compute_if_long(len(prompt.text) + len(prediction), encoded)


async def render_chat(services: GatewayServices, target: Target, body: ChatRequest, num_bytes: int) -> ChatPrompt:
    """Render the conversation with the model's template. `num_bytes` is the length of the body that contains it.

    Raises InvalidRequest, RateLimited or Unavailable.
    """
    prompts, settings = services.prompts.chat_prompts, target.settings
    if settings.template is None:
        return await services.compute_if_long(num_bytes, prompts.render, body, settings.parsers)
    with traced("render"), services.metrics.api.template_seconds.time():
        return await prompts.render_with(target.tenant_id, settings, body)


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


def constrain_chat(target: Target, body: ChatRequest, prepared: Prepared) -> Constraint | None:
    """Return the constraint on the answer. Raises InvalidRequest."""
    return chat_constraint(target.tokenizer, body, prepared)
