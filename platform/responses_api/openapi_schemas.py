"""Schemas of the responses of `/v1/responses`, for the OpenAPI document.

The bodies are built by `response_answer.py` and `output_items.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputTextDocument(TypedDict):
    """A text of the model. `logprobs` is empty unless the request includes it."""

    type: Literal["output_text"]
    text: str
    annotations: list[None]
    logprobs: list[dict[str, Any]]


class OutputMessageDocument(TypedDict):
    """The model's message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputTextDocument]


class ReasoningTextDocument(TypedDict):
    """A text of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputReasoningDocument(TypedDict):
    """The model's reasoning. `encrypted_content` is null unless the request includes it."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[None]
    content: list[ReasoningTextDocument]
    encrypted_content: str | None


class FunctionCallDocument(TypedDict):
    """A call that the client should answer with a `function_call_output` item. `arguments` is a string of JSON."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class CustomCallDocument(TypedDict):
    """A call that the client should answer with a `custom_tool_call_output` item."""

    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    input: str


OutputItemDocument = Annotated[
    OutputMessageDocument | OutputReasoningDocument | FunctionCallDocument | CustomCallDocument,
    Field(discriminator="type"),
]


class CachedTokensDocument(TypedDict):
    """The input tokens found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class ReasoningTokensDocument(TypedDict):
    """The output tokens that belong to the reasoning."""

    reasoning_tokens: int


class ResponseUsageDocument(TypedDict):
    """The tokens charged for the request."""

    input_tokens: int
    input_tokens_details: CachedTokensDocument
    output_tokens: int
    output_tokens_details: ReasoningTokensDocument
    total_tokens: int


class ResponseErrorDocument(TypedDict):
    """Why a response failed. `code` is one of OpenAI's codes, and `type` is this server's code."""

    code: str
    message: str
    type: str


class IncompleteDetails(TypedDict):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ConversationName(TypedDict):
    """The conversation that a response belongs to."""

    id: str


class ResponseDocument(TypedDict):
    """A response object. `store` says whether it is stored."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    conversation: ConversationName | None
    error: ResponseErrorDocument | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItemDocument]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsageDocument | None
    user: str | None


class DeletedResponse(TypedDict):
    """A stored response that was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ConversationDocument(TypedDict):
    """A conversation, without its items."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class DeletedConversation(TypedDict):
    """A conversation that was deleted."""

    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


class ConversationItemDocument(TypedDict):
    """An item of a conversation. Its `type` decides which of the other fields it has."""

    id: str
    type: str
    status: NotRequired[ItemStatus]
    role: NotRequired[str]
    content: NotRequired[list[dict[str, Any]]]
    summary: NotRequired[list[dict[str, Any]]]
    encrypted_content: NotRequired[str | None]
    call_id: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]
    output: NotRequired[str | list[dict[str, Any]]]
    phase: NotRequired[str]


class ConversationItemList(TypedDict):
    """A page of the items of a conversation. `last_id` is the `after` of the next page."""

    object: Literal["list"]
    data: list[ConversationItemDocument]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputItemList(TypedDict):
    """A page of the input items of a stored response. `last_id` is the `after` of the next page."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokensDocument(TypedDict):
    """The number of tokens in the prompt of a response."""

    object: Literal["response.input_tokens"]
    input_tokens: int
