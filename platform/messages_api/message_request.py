"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, and the chat requests that they stand for."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, Field

from loramux.platform.bodies.chat_request import MAX_MESSAGES, ChatRequest
from loramux.platform.bodies.conversation import ChatMessage
from loramux.platform.bodies.sampling_fields import INT64, MAX_MODEL_NAME, usable_stops
from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.bodies.structural_tags import Schema
from loramux.platform.bodies.unsupported_fields import Neutral
from loramux.platform.errors import InvalidRequest
from loramux.platform.grammars.constraint import Constraint
from loramux.platform.messages_api.blocks import SentMessage, TextBlock, TextBlocks
from loramux.platform.messages_api.context_management import ContextManagement
from loramux.platform.messages_api.message_tools import MessageToolChoice, MessageTools, chat_choice, is_parallel
from loramux.platform.messages_api.turns import chat_messages

BILLING_PREFIX = "x-anthropic-billing-header:"
"""Start of a system block in which Claude Code describes itself to Anthropic's billing. It differs in each request."""

Effort: TypeAlias = Literal["low", "medium", "high", "xhigh", "max"]
Display: TypeAlias = Literal["summarized", "omitted"]


class ThinkingEnabled(StrictModel):
    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1, lt=2**31)
    display: Display | None = None


class ThinkingAdaptive(StrictModel):
    type: Literal["adaptive"]
    display: Display | None = None


class ThinkingDisabled(StrictModel):
    type: Literal["disabled"]


Thinking: TypeAlias = Annotated[ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled, Field(discriminator="type")]


class JsonSchemaOutput(StrictModel):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(StrictModel):
    NEUTRAL: ClassVar[Neutral] = {"task_budget": ()}

    format: JsonSchemaOutput | None = None
    effort: Effort | None = None


class Diagnostics(StrictModel):
    """Asks Anthropic's servers why a prompt was not cached. It has no effect."""

    previous_message_id: str | None = None


class RequestMetadata(StrictModel):
    user_id: str | None = None


class MessagesChat(ChatRequest):
    """A chat request made from a Messages request."""

    output_schema: Schema | None = None
    is_thinking: bool = False
    omits_thinking: bool = False
    """Whether the answer shows thinking blocks without their text."""

    @property
    def thinks(self) -> bool:
        return self.is_thinking

    @property
    def requires_reasoning(self) -> bool:
        # Thinking is the model's choice, and a model without separate reasoning never thinks.
        return False

    @property
    def fits_context(self) -> bool:
        # Messages requests must have `max_tokens`, and clients send the most that any model can generate.
        return True

    def constraint(self) -> Constraint | None:
        if self.output_schema is None:
            return None
        return Constraint.of_json("json_schema", self.output_schema, "output_config.format.schema")


class CountTokensRequest(StrictModel):
    """The body of `/v1/messages/count_tokens`: the part of a Messages request that the prompt depends on."""

    NEUTRAL: ClassVar[Neutral] = {
        "container": (),
        "fallbacks": ([],),
        "inference_geo": ("global",),
        "mcp_servers": ([],),
        "speed": ("standard",),
    }
    """Fields of Anthropic's API that this server does not have."""

    model: str = Field(max_length=MAX_MODEL_NAME)
    messages: Annotated[list[SentMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: TextBlocks | None = None
    tools: MessageTools | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonSchemaOutput | None = None
    """The older name of `output_config.format`."""
    cache_control: Any = None
    context_management: ContextManagement | None = None
    diagnostics: Diagnostics | None = None

    def chat(self) -> MessagesChat:
        """Return the chat request. Raises InvalidRequest if the messages or the tools do not fit together."""
        return self._chat()

    def _chat(self, **more: Any) -> MessagesChat:
        first = next((index for index, message in enumerate(self.messages) if message.role != "system"), None)
        if first is None:
            raise InvalidRequest("messages must contain a message of the user", param="messages")
        messages = [*self._system_message(first), *chat_messages(self.messages, first)]
        if self.context_management is not None:
            messages = self.context_management.edited(messages)
        continues = messages[-1].role == "assistant"
        thinks = isinstance(self.thinking, ThinkingEnabled | ThinkingAdaptive)
        effort = None if self.output_config is None else self.output_config.effort
        if continues and thinks:
            raise InvalidRequest(
                "the last message must be the user's: an answer that is already begun cannot start with thinking",
                param="messages",
            )
        chat = MessagesChat.model_construct(
            model=self.model,
            messages=messages,
            tools=None if self.tools is None else [tool.chat_tool() for tool in self.tools],
            tool_choice=chat_choice(self.tool_choice),
            parallel_tool_calls=is_parallel(self.tool_choice),
            reasoning_effort=effort if thinks else "none",
            is_thinking=thinks,
            include_reasoning=thinks,
            thinking_token_budget=self.thinking.budget_tokens if isinstance(self.thinking, ThinkingEnabled) else None,
            omits_thinking=getattr(self.thinking, "display", None) == "omitted",
            output_schema=self._output_schema(),
            add_generation_prompt=False if continues else None,
            continue_final_message=True if continues else None,
            **more,
        )
        chat.check()
        return chat

    def _system_message(self, num_leading: int) -> list[ChatMessage]:
        """Return the system prompt, with the `num_leading` system messages that begin the conversation."""
        blocks = [
            *(self.system or ()),
            *(block for message in self.messages[:num_leading] for block in message.content),
        ]
        texts = [one.text for one in blocks if isinstance(one, TextBlock) and not one.text.startswith(BILLING_PREFIX)]
        if not texts:
            return []
        content = texts[0] if len(texts) == 1 else tuple(texts)
        return [ChatMessage.model_construct(role="system", content=content)]

    def _output_schema(self) -> Schema | None:
        wanted = self.output_config.format if self.output_config is not None else None
        found = wanted or self.output_format
        return None if found is None else found.schema_


class MessagesRequest(CountTokensRequest):
    """The body of `/v1/messages`."""

    max_tokens: int = Field(ge=1, lt=INT64)
    temperature: float | None = Field(None, ge=0, le=1)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=2**31)
    stop_sequences: Annotated[Annotated[list[str], Field(fail_fast=True)] | None, AfterValidator(usable_stops)] = None
    stream: bool | None = None
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    """`auto` stands for the tier of the key, and `standard_only` for the default tier."""

    def chat(self) -> MessagesChat:
        if isinstance(self.thinking, ThinkingEnabled) and self.thinking.budget_tokens >= self.max_tokens:
            raise InvalidRequest("max_tokens must be greater than thinking.budget_tokens", param="max_tokens")
        return self._chat(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences,
            stream=self.stream,
            user=None if self.metadata is None else self.metadata.user_id,
            service_tier="default" if self.service_tier == "standard_only" else None,
        )
