"""The body of a chat request. Other surfaces turn their bodies into one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from loramux.engine.chat_templates.reasoning_effort import ReasoningEffort
from loramux.platform.bodies import unsupported_fields
from loramux.platform.bodies.conversation import ChatMessage
from loramux.platform.bodies.generation_request import GenerationRequest
from loramux.platform.bodies.prediction import Prediction
from loramux.platform.bodies.sampling_fields import INT64
from loramux.platform.bodies.tools import AUTO, ToolChoice, ToolChoiceField, Tools
from loramux.platform.bodies.unsupported_fields import Neutral
from loramux.platform.errors import InvalidRequest

MAX_MESSAGES = 4096
MAX_CHAT_LOGPROBS = 20
MAX_METADATA = 64


def _few_entries(value: Any) -> Any:
    # Count entries before validating them, because dict validation does not stop at the first invalid value.
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise ValueError(f"at most {MAX_METADATA} entries are allowed")
    return value


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
Metadata = Annotated[dict[str, str], BeforeValidator(_few_entries)]


class ChatRequest(GenerationRequest):
    NEUTRAL: ClassVar[Neutral] = unsupported_fields.CHAT
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = GenerationRequest.WITHOUT_EFFECT | {
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
    }
    MAX_ALTERNATIVES: ClassVar[Mapping[str, int]] = {
        **GenerationRequest.MAX_ALTERNATIVES,
        "top_logprobs": MAX_CHAT_LOGPROBS,
    }
    PROMPT: ClassVar[str] = "messages"

    messages: Messages
    max_completion_tokens: int | None = Field(None, ge=1, lt=INT64)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=-1, le=MAX_CHAT_LOGPROBS)

    tools: Tools | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None

    # Options of the chat template and the reasoning. All except `reasoning_effort` are vLLM extensions.
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = Field(None, ge=-1, lt=2**31)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None

    metadata: Metadata | None = None
    prediction: Prediction | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    store: bool | None = None

    @property
    def has_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def num_logprobs(self) -> int | None:
        return (self.num_alternatives("top_logprobs") or 0) if self.has_logprobs else None

    @property
    def max_thinking_tokens(self) -> int | None:
        # In vLLM, -1 means no limit.
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    @property
    def thinks(self) -> bool | None:
        """Whether the model is to reason before it answers. None leaves this to the chat template."""
        return None if self.reasoning_effort is None else self.reasoning_effort != "none"

    @property
    def requires_reasoning(self) -> bool:
        """True if a model that cannot be told how much to reason refuses the request. False if it answers."""
        return True

    @property
    def adds_special_tokens(self) -> bool:
        """True if the rendered conversation is tokenised like a plain prompt, with special tokens around it."""
        return False

    def check(self) -> None:
        GenerationRequest.check(self)
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidRequest("max_tokens and max_completion_tokens differ", param="max_completion_tokens")
        self._check_tools()
        if self.continue_final_message and self.add_generation_prompt is not False:
            raise InvalidRequest(
                "continue_final_message needs add_generation_prompt: false", param="continue_final_message"
            )

    def _check_tools(self) -> None:
        choice, names = self.choice_of_tools, {tool.name for tool in self.tools or ()}
        if not (choice.names or set()) <= names:
            raise InvalidRequest("tool_choice names a function that is not in tools", param="tool_choice")
        if choice.is_forced and not names:
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")

    @property
    def choice_of_tools(self) -> ToolChoice:
        return self.tool_choice or AUTO

    @property
    def offered_tools(self) -> Tools:
        """The tools that the model may call. There are none if `tool_choice` is none."""
        return [] if self.choice_of_tools.mode == "none" else self.tools or []

    @property
    def argument_schemas(self) -> dict[str, dict[str, Any]]:
        """The schemas of the arguments of the offered tools, by name."""
        return {tool.name: tool.schema_of_arguments for tool in self.offered_tools}

    @property
    def echoed(self) -> str:
        """The text that the answer repeats: the last message if `echo` is true and the message is the assistant's."""
        last = self.messages[-1]
        return last.text if self.echo and last.role == "assistant" else ""

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
