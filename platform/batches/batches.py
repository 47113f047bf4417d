"""`/v1/batches`: create, retrieve, list and cancel batches."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import Response

from loramux.platform.batches.batch_rows import Batch, NewBatch
from loramux.platform.batches.documents import BatchDocument, BatchList
from loramux.platform.batches.files import MAX_LIFETIME_S, MIN_LIFETIME_S, ListedAfter
from loramux.platform.batches.services import Kept, OwnerOfKey
from loramux.platform.batches.tenant_files import Listing
from loramux.platform.bodies.request_body import parse_body, read_body
from loramux.platform.bodies.strict_model import StrictModel
from loramux.platform.requests.authentication import Services
from loramux.platform.requests.error_responses import json_response
from loramux.platform.requests.item_pages import shown_page
from loramux.platform.requests.openapi import errors, takes

router = APIRouter(tags=["batches"])

MAX_BODY_BYTES = 64 * 1024
MAX_LISTED = 100

BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
Label = Annotated[str, Field(max_length=64)]


class OutputExpiry(StrictModel):
    """How long the output and error files are kept after they have been written, in seconds."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_LIFETIME_S, le=MAX_LIFETIME_S)


class CreateBatch(StrictModel):
    """`metadata` has up to 16 labels for the caller's own use."""

    input_file_id: str = Field(max_length=64)
    endpoint: BatchEndpoint
    completion_window: Literal["24h"]
    metadata: dict[Label, Annotated[str, Field(max_length=512)]] | None = Field(default=None, max_length=16)
    output_expires_after: OutputExpiry | None = None


@router.post("/v1/batches", openapi_extra=takes(CreateBatch), response_model=BatchDocument, responses=errors(404))
async def create_batch(request: Request, owner: OwnerOfKey, services: Services, kept: Kept) -> Response:
    """Run the requests of a file when the engine has room. The answers are in the batch's output file."""
    body = parse_body(await read_body(request, MAX_BODY_BYTES), CreateBatch)
    expiry = body.output_expires_after
    lifetime_us = None if expiry is None else expiry.seconds * 1_000_000
    new = NewBatch(body.endpoint, body.input_file_id, body.metadata or {}, lifetime_us)
    return json_response(describe_batch(await services.call(kept.batches.create, owner, new)))


@router.get("/v1/batches", response_model=BatchList)
async def list_batches(
    owner: OwnerOfKey,
    services: Services,
    kept: Kept,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED, description="Items per page.")] = 20,
    after: ListedAfter = None,
) -> Response:
    """List the batches that the key may see, newest first."""
    found, has_more = await services.call(kept.batches.list, owner, Listing(limit, after))
    return json_response(shown_page([dict(describe_batch(one)) for one in found], has_more=has_more))


@router.get("/v1/batches/{batch_id}", response_model=BatchDocument)
async def retrieve_batch(batch_id: str, owner: OwnerOfKey, services: Services, kept: Kept) -> Response:
    """Retrieve a batch with its progress and, once it has finished, its files."""
    return json_response(describe_batch(await services.call(kept.batches.get, owner, batch_id)))


@router.post("/v1/batches/{batch_id}/cancel", response_model=BatchDocument, responses=errors(409))
async def cancel_batch(batch_id: str, owner: OwnerOfKey, services: Services, kept: Kept) -> Response:
    """Cancel a batch. Requests that are running finish, and their answers are in the output file."""
    return json_response(describe_batch(await services.call(kept.batches.cancel, owner, batch_id)))


def describe_batch(batch: Batch) -> BatchDocument:
    failures = [asdict(one) for one in batch.errors]
    ended = {state: _s(batch.finished_us) if batch.state == state else None for state in _FINAL}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": failures} if failures else None,  # type: ignore[typeddict-item]
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": batch.state,
        "output_file_id": batch.output_file_id if batch.is_finished else None,
        "error_file_id": batch.error_file_id if batch.is_finished else None,
        "created_at": batch.created_us // 1_000_000,
        "in_progress_at": _s(batch.in_progress_us),
        "expires_at": batch.expires_us // 1_000_000,
        "finalizing_at": _s(batch.finalizing_us),
        "completed_at": ended["completed"],
        "failed_at": ended["failed"],
        "expired_at": ended["expired"],
        "cancelling_at": _s(batch.cancelling_us),
        "cancelled_at": ended["cancelled"],
        "request_counts": {"total": batch.num_lines, "completed": batch.num_completed, "failed": batch.num_failed},
        "metadata": dict(batch.labels) or None,
    }


_FINAL = ("completed", "failed", "expired", "cancelled")


def _s(time_us: int | None) -> int | None:
    return None if time_us is None else time_us // 1_000_000
