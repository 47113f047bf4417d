"""The adapter store's errors as the REST API reports them."""

from __future__ import annotations

from collections.abc import Mapping

from loramux.adapter_store.errors import (
    AdapterExists,
    AdapterInUse,
    AdapterNotFound,
    AdapterUnavailable,
    AliasChanged,
    AliasNotFound,
    BaseInUse,
    BaseNotFound,
    BasesDiffer,
    BlobStoreUnavailable,
    EvalNotFound,
    EvalNotPassed,
    FileNotFound,
    GrantNotFound,
    LimitReached,
    NothingToRollBack,
    OriginalNotKept,
    PushUnderway,
    Refused,
    RequestsRunning,
    SourceUnavailable,
    TenantNotFound,
    UploadNotFound,
    ValidationFailed,
    VersionInUse,
    VersionNotFound,
    VersionNotReady,
    WeightsBeingPurged,
)
from loramux.platform.errors import (
    ApiError,
    Conflict,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    RateLimited,
    Unavailable,
)

_NOT_FOUND: Mapping[type[Exception], str] = {
    TenantNotFound: "tenant_not_found",
    AdapterNotFound: "adapter_not_found",
    VersionNotFound: "version_not_found",
    AliasNotFound: "alias_not_found",
    BaseNotFound: "base_not_found",
    EvalNotFound: "eval_not_found",
    GrantNotFound: "grant_not_found",
    UploadNotFound: "upload_not_found",
    FileNotFound: "file_not_found",
    OriginalNotKept: "original_not_kept",
}
_CONFLICTS: Mapping[type[Exception], tuple[str, str | None]] = {
    AdapterExists: ("adapter_exists", "name"),
    AdapterInUse: ("adapter_in_use", None),
    BaseInUse: ("base_in_use", None),
    BasesDiffer: ("bases_differ", "weights"),
    VersionNotReady: ("version_not_ready", "version"),
    VersionInUse: ("version_in_use", "version"),
    EvalNotPassed: ("eval_not_passed", "require_eval"),
    NothingToRollBack: ("nothing_to_roll_back", "revision"),
}
RETRY_AFTER_S = 5.0


def api_error(error: Exception) -> ApiError:
    """The API error for a store error, with its status, code and parameter."""
    if isinstance(error, Refused):
        return InvalidRequest(error.message, code=error.code, param=error.param)
    if isinstance(error, LimitReached):
        return RateLimited(str(error), code=error.code, retry_after_s=error.retry_after_s)
    if isinstance(error, PushUnderway):
        return Unavailable(str(error), code="adapter_validating", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, RequestsRunning):
        return Conflict(str(error), code="requests_running", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, AliasChanged):
        return PreconditionFailed(str(error), param="If-Match")
    if isinstance(error, AdapterUnavailable | BlobStoreUnavailable):
        closed_for_s = error.retry_after_s if isinstance(error, BlobStoreUnavailable) else None
        # Only the operator may see the bucket and the address, so they are in the log but not in the message.
        return Unavailable(
            "the adapter store cannot be reached; try again",
            code="store_unavailable",
            retry_after_s=closed_for_s or RETRY_AFTER_S,
        )
    if isinstance(error, ValidationFailed | WeightsBeingPurged):
        # Only the log says why, because equal weights can be another tenant's.
        return Unavailable(
            "the adapter cannot be validated now; try again", code="store_unavailable", retry_after_s=RETRY_AFTER_S
        )
    if isinstance(error, SourceUnavailable):
        # Only a platform administrator can name a source, so the message may contain the source's address.
        return Unavailable(str(error), code="source_unavailable", retry_after_s=RETRY_AFTER_S)
    if type(error) in _CONFLICTS:
        code, param = _CONFLICTS[type(error)]
        return Conflict(str(error), code=code, param=param)
    if type(error) in _NOT_FOUND:
        return NotFound(str(error), code=_NOT_FOUND[type(error)])
    return ApiError("the adapter store failed")
