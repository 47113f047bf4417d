"""The errors that callers see. `requests/error_responses.py` turns them into responses with this body:

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """An error with the status, type and code sent to the caller."""

    status = 500
    type = "server_error"
    code = "internal_error"
    has_begun = False
    """Whether the request had output before it failed. It is charged for what it had."""

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        self.retry_after_s = retry_after_s
        self.headers = dict(headers or {})

    def envelope(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response_headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return self.headers
        return {**self.headers, "retry-after": str(max(1, math.ceil(self.retry_after_s)))}


class CallerError(ApiError):
    """An error that the caller can avoid, of the type that OpenAI's API gives such errors."""

    type = "invalid_request_error"


class InvalidRequest(CallerError):
    """The request itself is wrong. Retrying it does not help."""

    status = 400
    code = "invalid_value"


def context_exceeded(max_tokens: int, found: str, param: str, instead: str = "") -> InvalidRequest:
    """Return the error for a prompt, or a prompt and its answer, that exceed the context.

    `found` says what is too long. Clients look for the first words and for "Please reduce the length", as in OpenAI's
    and vLLM's errors.
    """
    return InvalidRequest(
        f"This model's maximum context length is {max_tokens} tokens; {found}. "
        f"Please reduce the length of the input prompt{instead}.",
        param=param,
        code="context_length_exceeded",
    )


class Unauthenticated(CallerError):
    """The key is missing or invalid."""

    status = 401
    code = "invalid_api_key"

    def response_headers(self) -> dict[str, str]:
        return {**super().response_headers(), "www-authenticate": "Bearer"}


class PermissionDenied(CallerError):
    """The key is valid, but its scopes do not permit the call."""

    status = 403
    code = "insufficient_scope"


class RequestCancelled(CallerError):
    """An authorised caller cancelled the request. The status is 403, because OpenAI's clients do not retry it."""

    status = 403
    code = "request_cancelled"


class NotFound(CallerError):
    """The resource does not exist, or the caller must not learn that it exists."""

    status = 404
    code = "not_found"


class NotOnThisGateway(NotFound):
    """The call exists, but an additional gateway does not have what it needs."""

    code = "not_on_this_gateway"


class MethodNotAllowed(CallerError):
    """The path exists but does not support the method."""

    status = 405
    code = "method_not_allowed"


class Conflict(CallerError):
    """The name is taken, or the state does not allow the change."""

    status = 409
    code = "conflict"


class PreconditionFailed(CallerError):
    """The resource has changed since the caller read it."""

    status = 412
    code = "precondition_failed"


class PayloadTooLarge(CallerError):
    """The body is larger than this server accepts."""

    status = 413
    code = "payload_too_large"


class UnsupportedEncoding(CallerError):
    """The body is compressed in a way that this server cannot read."""

    status = 415
    code = "unsupported_content_encoding"


class UnprocessableRequest(CallerError):
    """The request is well-formed but contradicts an earlier one."""

    status = 422
    code = "unprocessable"


class PreconditionRequired(CallerError):
    """The request lacks the If-Match header, which this change requires."""

    status = 428
    code = "precondition_required"


class RateLimited(ApiError):
    """A quota is exhausted, or the caller has reached its limit of concurrent calls."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Unavailable(ApiError):
    """The server cannot serve the request now. A retry may succeed."""

    status = 503
    type = "server_error"
    code = "overloaded"
