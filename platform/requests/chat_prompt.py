"""Renders a conversation into a prompt, and derives from the chat template how to parse the model's answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from loramux.adapter_store.formats.version_files.answer_parsers import AnswerParsers
from loramux.engine.chat_templates.chat_template import ChatTemplate
from loramux.engine.chat_templates.messages import template_arguments
from loramux.engine.chat_templates.reasoning_effort import ReasoningEffort, nearest_effort
from loramux.engine.chat_templates.template_check import TemplateFeatures
from loramux.engine.chat_templates.template_refused import TemplateRefused
from loramux.platform.accounts.version_settings import VersionSettings
from loramux.platform.bodies.chat_request import ChatRequest
from loramux.platform.bodies.conversation import rendered_fields
from loramux.platform.errors import InvalidRequest
from loramux.platform.generation.plan import Reasoning
from loramux.platform.tokenizer.tenant_templates import TenantTemplates
from loramux.platform.tool_calls.detection import chosen_markers, chosen_parser, last_marker
from loramux.platform.tool_calls.reasoning import HARMONY


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    text: str
    reasoning: Reasoning | None
    """None if the answer contains no reasoning."""
    tool_format: str | None
    """The format of tool calls. None if the request offers no tools, or if calls are not parsed."""


class ChatPrompts:
    """Renders with the base's chat template, or with a template that a tenant uploaded with an adapter."""

    def __init__(self, base: ChatTemplate | None, tenants: TenantTemplates) -> None:
        self._base = base
        self._base_features = None if base is None else base.known_features
        self._tenants = tenants

    def render(self, body: ChatRequest, parsers: AnswerParsers) -> ChatPrompt:
        """Render with the base's template. `parsers` are the parsers chosen for the model. Raises InvalidRequest."""
        if self._base is None:
            raise InvalidRequest(
                "this model has no chat template: call /v1/completions", param="messages", code="no_chat_template"
            )
        with _invalid_requests():
            arguments = _arguments(body, self._base_features)
            source = self._base.source(has_tools=arguments["tools"] is not None)
            text = self._base.render(**arguments)
        return _prompt(text, source, body, parsers)

    async def render_with(self, tenant_id: str, settings: VersionSettings, body: ChatRequest) -> ChatPrompt:
        """Render with the version's own template. Raises InvalidRequest, RateLimited or Unavailable."""
        source, special_tokens = settings.template, settings.special_tokens
        assert source is not None
        features = await self._tenants.features(tenant_id, source, special_tokens)
        with _invalid_requests():
            arguments = _arguments(body, features)
        text = await self._tenants.render(tenant_id, source, **arguments, special_tokens=special_tokens)
        return _prompt(text, source, body, settings.parsers)

    def close(self) -> None:
        self._tenants.close()


@contextmanager
def _invalid_requests() -> Iterator[None]:
    try:
        yield
    except TemplateRefused as refused:
        raise InvalidRequest(refused.message, param=refused.param, code=refused.code) from None


def _prompt(text: str, source: str, body: ChatRequest, parsers: AnswerParsers) -> ChatPrompt:
    markers, reasoning = chosen_markers(parsers, source), None
    if markers is None and body.max_thinking_tokens is not None and body.requires_reasoning:
        raise InvalidRequest(
            "this model's answers have no separate reasoning",
            param="thinking_token_budget",
            code="unsupported_parameter",
        )
    if markers is HARMONY:
        # In the harmony format, the end marker can end any message. Whether the prompt ends within the reasoning is
        # determined later, from its tokens.
        reasoning = Reasoning(markers, is_open=False)
    elif markers is not None:
        last = last_marker(text, markers, _continued(body))
        # If the prompt has already ended the reasoning, the answer contains none.
        if last != markers.end:
            reasoning = Reasoning(markers, is_open=last == markers.begin)
    return ChatPrompt(text, reasoning, chosen_parser(parsers, source) if body.offered_tools else None)


def _continued(body: ChatRequest) -> str:
    """Return the beginning of the answer if the request contains one, otherwise ""."""
    final = body.messages[-1]
    return final.text if body.continue_final_message and final.role == "assistant" else ""


def _arguments(body: ChatRequest, features: TemplateFeatures | None) -> dict[str, Any]:
    """Return the arguments for a template's `render`. Raises InvalidRequest or TemplateRefused if the template does not
    support one of them.
    """
    tools = [tool.model_dump(exclude_none=True) for tool in body.offered_tools]
    return {
        **template_arguments(rendered_fields(body.messages), tools, features),
        "kwargs": _kwargs(body, features),
        "add_generation_prompt": body.add_generation_prompt is not False,
        "continue_final_message": bool(body.continue_final_message),
    }


def _kwargs(body: ChatRequest, features: TemplateFeatures | None) -> Mapping[str, Any]:
    """Return the template's additional variables. `chat_template_kwargs` takes precedence over `reasoning_effort`."""
    effort, thinks, kwargs = body.reasoning_effort, body.thinks, body.chat_template_kwargs or {}
    if thinks is None:
        return kwargs
    known = {} if features is None else _thinking(features, effort, thinks=thinks)
    if not known and thinks and body.requires_reasoning:
        raise InvalidRequest(
            "this model's chat template does not use reasoning_effort",
            param="reasoning_effort",
            code="unsupported_parameter",
        )
    return {**known, **kwargs}


def _thinking(features: TemplateFeatures, effort: ReasoningEffort | None, *, thinks: bool) -> dict[str, Any]:
    """Return the variables that make the model think with this effort, as far as the template has them."""
    variables: dict[str, Any] = {}
    if features.thinking_switch is not None:
        variables[features.thinking_switch] = thinks
    efforts = features.reasoning_efforts
    if effort is None and thinks and features.is_off_by_default:
        # In Anthropic's API, the default is high.
        effort = "high"
    if not thinks and variables and "none" not in efforts:
        return variables
    chosen = None if effort is None else nearest_effort(efforts, effort)
    return variables if chosen is None else {**variables, "reasoning_effort": chosen}
