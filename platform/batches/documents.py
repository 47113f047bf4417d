"""Schemas of files and batches, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict


class FileDocument(TypedDict):
    """A file. `expires_at` is null if it is kept until it is deleted."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]


class FileList(TypedDict):
    """A page of the files."""

    object: Literal["list"]
    data: list[FileDocument]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(TypedDict):
    """Confirms that a file has been deleted."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class LineError(TypedDict):
    """Why a batch failed. `line` is the line of the input file, or null."""

    code: str
    message: str
    param: str | None
    line: int | None


class LineErrors(TypedDict):
    """The first errors of the input file."""

    object: Literal["list"]
    data: list[LineError]


class RequestCounts(TypedDict):
    """The numbers of all requests, of those that succeeded, and of those that failed."""

    total: int
    completed: int
    failed: int


class BatchDocument(TypedDict):
    """A batch. The times of states that it has not reached are null."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: LineErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating", "in_progress", "finalizing", "cancelling", "completed", "failed", "expired", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(TypedDict):
    """A page of the batches, newest first."""

    object: Literal["list"]
    data: list[BatchDocument]
    first_id: str | None
    last_id: str | None
    has_more: bool
