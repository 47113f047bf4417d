"""Every error that a caller may see: raised where the cause is known, turned into the envelope in one place.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """An error with the status, type and code that its caller gets."""

    status = 500
    type = "server_error"
    code = "internal_error"

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


class InvalidRequest(ApiError):
    """The request itself is wrong; sending it again changes nothing."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class Unauthenticated(ApiError):
    """No key, or one that opens nothing."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def response_headers(self) -> dict[str, str]:
        return {**super().response_headers(), "www-authenticate": "Bearer"}


class PermissionDenied(ApiError):
    """The key is good, but its scopes do not allow this."""

    status = 403
    type = "invalid_request_error"
    code = "insufficient_scope"


class RequestCancelled(ApiError):
    """Somebody who may ended the request; not a status that clients answer by sending it again."""

    status = 403
    type = "invalid_request_error"
    code = "request_cancelled"


class NotFound(ApiError):
    """It does not exist, or the caller may not know that it does."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(ApiError):
    """The path exists, the method does not."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class Conflict(ApiError):
    """The name is taken, or the state does not allow the change."""

    status = 409
    type = "invalid_request_error"
    code = "conflict"


class PreconditionFailed(ApiError):
    """What was to be changed is no longer what the caller saw."""

    status = 412
    type = "invalid_request_error"
    code = "precondition_failed"


class PayloadTooLarge(ApiError):
    """The body is larger than this server reads."""

    status = 413
    type = "invalid_request_error"
    code = "payload_too_large"


class UnprocessableRequest(ApiError):
    """The request is well-formed, but contradicts what was sent before."""

    status = 422
    type = "invalid_request_error"
    code = "unprocessable"


class PreconditionRequired(ApiError):
    """A change must say which state it is meant for."""

    status = 428
    type = "invalid_request_error"
    code = "precondition_required"


class RateLimited(ApiError):
    """A quota is used up for now, or the caller has as many calls under way as it may."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class DeadlineExceeded(ApiError):
    """The request's time was up before it was through."""

    status = 504
    type = "server_error"
    code = "deadline_exceeded"


class Unavailable(ApiError):
    """The server cannot do it now; the same request may succeed later."""

    status = 503
    type = "server_error"
    code = "overloaded"
