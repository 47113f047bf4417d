"""The body of `/v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BeforeValidator, Field

from loramux.engine.chat_templates.reasoning_effort import ReasoningEffort
from loramux.platform.bodies import unsupported_fields
from loramux.platform.bodies.chat_request import MAX_CHAT_LOGPROBS, Metadata
from loramux.platform.bodies.response_formats import StructuredOutputs
from loramux.platform.bodies.sampling_fields import INT64, SamplingFields
from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.bodies.structural_tags import Schema
from loramux.platform.bodies.unsupported_fields import Neutral
from loramux.platform.errors import InvalidRequest
from loramux.platform.responses_api.input_items import Input, ItemReference
from loramux.platform.responses_api.response_tools import ToolChoiceField, Tools
from loramux.platform.service_tiers import AskedTier

LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED: Final = "reasoning.encrypted_content"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""The values of `include`. Those after the second have no effect, because answers have no items of these types."""


def _conversation_id(value: Any) -> Any:
    match value:
        case {"id": str(conversation_id), **others} if not others:
            return conversation_id
        case None | str():
            return value
    raise ValueError('must be an ID or {"id": ...}')


ConversationId = Annotated[str, BeforeValidator(_conversation_id)]


class PlainFormat(StrictModel):
    type: Literal["text", "json_object"]


class SchemaFormat(StrictModel):
    """`strict` changes nothing, because answers always follow the schema."""

    type: Literal["json_schema"]
    name: str = Field(min_length=1, max_length=64)
    schema_: Schema = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextConfig(StrictModel):
    NEUTRAL: ClassVar[Neutral] = unsupported_fields.RESPONSES_TEXT

    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None


class ReasoningConfig(StrictModel):
    """Answers contain the reasoning itself and no summaries, so the two fields for summaries have no effect."""

    NEUTRAL: ClassVar[Neutral] = unsupported_fields.RESPONSES_REASONING

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(StrictModel):
    include_obfuscation: bool | None = None


class ResponseRequest(SamplingFields):
    NEUTRAL: ClassVar[Neutral] = unsupported_fields.RESPONSES
    WITHOUT_EFFECT: ClassVar[frozenset[str]] = frozenset(
        {
            "client_metadata",
            "max_tool_calls",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "stream_options.include_obfuscation",
        }
    )
    """Fields that cannot change the answer. They are accepted with any value of their type, and the response object
    repeats some of them.
    """

    input: Input = Field(default_factory=list)
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=INT64)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_CHAT_LOGPROBS)
    include: Annotated[list[Includable], Field(fail_fast=True, max_length=16)] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Tools | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: ConversationId | None = None
    user: str | None = None

    client_metadata: dict[str, Any] | None = None
    """Codex sends this field."""
    max_tool_calls: int | None = Field(None, ge=1, lt=INT64)
    metadata: Metadata | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: AskedTier | None = None

    # vLLM's extensions.
    chat_template_kwargs: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None

    def includes(self, part: Includable) -> bool:
        return part in (self.include or ())

    @property
    def references(self) -> list[tuple[int, ItemReference]]:
        """The references among the input items, each with its index."""
        given = self.input if isinstance(self.input, list) else ()
        return [(index, item) for index, item in enumerate(given) if isinstance(item, ItemReference)]

    def check(self) -> None:
        """Raise InvalidRequest for fields that contradict each other."""
        if self.conversation is not None and self.previous_response_id is not None:
            raise InvalidRequest(
                "a request continues either a conversation or a previous response", param="previous_response_id"
            )
        if self.input == [] and self.conversation is None and self.previous_response_id is None:
            raise InvalidRequest(
                "input is required in a request that continues no conversation and no response",
                param="input",
                code="missing_required_parameter",
            )
        if self.top_logprobs and not self.includes(LOGPROBS):
            raise InvalidRequest(f"top_logprobs needs {LOGPROBS} in include", param="top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
