"""Anthropic's form of errors (https://platform.claude.com/docs/en/api/errors)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loramux.platform.errors import ApiError
from loramux.platform.messages_api.limit_headers import add_limit_headers
from loramux.platform.requests.error_responses import ErrorForm

OVERLOADED = 529
"""Anthropic's status for a server that cannot serve the request now. Its clients retry it."""

ERROR_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "api_error",
    OVERLOADED: "overloaded_error",
}


CHAT_FIELDS: Mapping[str, str] = {
    "continue_final_message": "messages",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""The names in the Messages API of fields of a chat request, where they differ."""


def message_error(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return the body of an error. The message starts with the field's name, for which the envelope has no place."""
    status = message_status(error)
    kind = ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "api_error")
    message, param = error.message, _named(error.param)
    if error.code == "context_length_exceeded":
        # Agents recognise these words, and shorten the conversation.
        message = f"prompt is too long: {message}"
    elif param is not None and param not in message:
        message = f"{param}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _named(param: str | None) -> str | None:
    """Return the name that a field of the chat request has in the Messages API."""
    return None if param is None else CHAT_FIELDS.get(param, param).replace(".function.parameters", ".input_schema")


def message_status(error: ApiError) -> int:
    return OVERLOADED if error.status == 503 else error.status


MESSAGE_ERRORS = ErrorForm(
    body=message_error, status=message_status, id_header="request-id", add_headers=add_limit_headers
)
