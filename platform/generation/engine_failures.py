"""Maps the error codes in the engine's Finished messages to API errors."""

from __future__ import annotations

from loramux.platform.errors import ApiError, InvalidRequest, Unavailable

RETRY_S = 5.0


class AdapterUnloaded(Unavailable):
    """An operator or an administrator has unloaded the adapter. Clients see no difference to a failed load."""


def engine_failure(code: str | None, message: str | None) -> ApiError:
    """Return the API error for a sequence that failed."""
    match code:
        case "prompt_too_long":
            return InvalidRequest(message or "the prompt is too long", param="prompt", code="context_length_exceeded")
        case "request_too_large" | "invalid_request":
            return InvalidRequest(message or "the engine cannot run this request", code=code)
        case "wrong_task":
            return InvalidRequest(message or "the model does not generate", param="model", code=code)
        case "request_excluded":
            return InvalidRequest(message or "the engine stopped twice while running this request", code=code)
        case "adapter_unavailable" | "adapter_unloaded":
            kind = Unavailable if code == "adapter_unavailable" else AdapterUnloaded
            message = "the adapter cannot be loaded now; try again"
            return kind(message, code="adapter_unavailable", retry_after_s=RETRY_S)
        case "adapter_quarantined":
            return InvalidRequest(message or "the adapter contains non-finite values", code=code)
        case "overloaded":
            return Unavailable("the engine is overloaded; try again", code=code, retry_after_s=RETRY_S)
        case "engine_unavailable" | "replica_draining":
            return Unavailable("the engine stopped; try again", code="engine_unavailable", retry_after_s=RETRY_S)
        case "no_token_allowed":
            return InvalidRequest(message or "no token is allowed to follow", code=code)
        case "grammar_failed":
            return InvalidRequest(message or "the grammar cannot be followed", code=code)
        case "not_finite":
            return ApiError("the model produced non-finite values", code=code)
        case _:
            return ApiError(message or "the engine failed")


def is_of_model(failure: ApiError) -> bool:
    """Return whether the fault may be the model's or its adapter's. Wrong requests, overload, missed deadlines,
    unloaded adapters and stopped engines are not. Unknown errors and output that is not finite are plain ApiErrors.
    """
    if isinstance(failure, AdapterUnloaded):
        return False
    return type(failure) is ApiError or failure.code in ("adapter_unavailable", "adapter_quarantined")
