"""Schemas of the responses of the Messages API, for the listener's OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from loramux.platform.messages_api.api_version import HEADER, VERSIONS
from loramux.platform.messages_api.message_errors import ERROR_TYPES
from loramux.platform.requests.answers import Document
from loramux.platform.requests.openapi import Responses


class MessageTextBlock(TypedDict):
    """Text of the answer."""

    type: Literal["text"]
    text: str


class MessageThinkingBlock(TypedDict):
    """The model's reasoning. `thinking` is empty if the request omits it. Send the block back unchanged."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class MessageToolUseBlock(TypedDict):
    """A call of a tool that the request offered. Answer it with a `tool_result` block."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class OutputTokensDetails(TypedDict):
    """The output tokens that belong to the reasoning."""

    thinking_tokens: int


class MessageUsage(TypedDict):
    """The tokens charged for the request. The prompt has `input_tokens` plus `cache_read_input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[OutputTokensDetails]
    service_tier: Literal["standard", "priority", "flex"]


class MessageDocument(TypedDict):
    """An answer. `stop_sequence` is the stop sequence that ended it."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageTextBlock | MessageThinkingBlock | MessageToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageError(TypedDict):
    """What went wrong. The message names the offending field."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "conflict_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "timeout_error",
        "overloaded_error",
    ]
    message: str


class MessageErrorDocument(TypedDict):
    """An error, in Anthropic's form."""

    type: Literal["error"]
    error: MessageError
    request_id: str


class TokenCountDocument(TypedDict):
    """The number of tokens of a prompt."""

    input_tokens: int


class MessageModel(TypedDict):
    """A model that the caller may name, in Anthropic's form."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class MessageModelPage(TypedDict):
    """A page of models, in Anthropic's form. If `has_more`, the query `after_id={last_id}` asks for the next page."""

    data: list[MessageModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


MEANINGS: Mapping[int, str] = {
    400: "The call is malformed.",
    401: "The key is missing or invalid.",
    403: "The key's scopes do not allow the call.",
    404: "The model does not exist, or the caller has no access to it.",
    409: "The version has not been accepted for the base that this server serves.",
    413: "The body is too large.",
    415: "The body's content coding is not supported.",
    429: "A quota is exhausted, or the caller has too many concurrent calls.",
    529: "Temporarily unavailable.",
}

VERSION_PARAMETER = {
    "name": HEADER,
    "in": "header",
    "required": True,
    "description": "The version of Anthropic's API.",
    "schema": {"type": "string", "enum": list(VERSIONS)},
    "example": VERSIONS[-1],
}


def message_errors() -> Responses:
    """For `responses`: the errors of the Messages API."""
    return {
        status: {
            "model": MessageErrorDocument,
            "description": meaning,
            "content": {"application/json": {"example": _error_example(status)}},
        }
        for status, meaning in MEANINGS.items()
    }


def _error_example(status: int) -> Document:
    error = {"type": ERROR_TYPES[status], "message": MEANINGS[status]}
    return {"type": "error", "error": error, "request_id": f"req_{'0193a1b2' * 4}"}
