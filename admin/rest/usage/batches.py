"""`/batches`: the batches of tenants, with their progress, and their cancellation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Literal

from fastapi import APIRouter
from typing_extensions import TypedDict

from loramux.admin.rest.access import Caller, Reader, Services, Writer, known_names, tenant_filter
from loramux.admin.rest.listing import (
    ListDocument,
    Paging,
    TenantParam,
    check_identifier,
    list_document,
    paged,
    seconds,
)
from loramux.admin.rest.services import AdminServices
from loramux.platform.batches.batch_rows import Batch, BatchState
from loramux.platform.errors import NotFound
from loramux.platform.requests.openapi import errors

router = APIRouter(prefix="/batches", tags=["batches"])


class BatchErrorDocument(TypedDict):
    """Why a batch failed. `line` is the line of the input file, or null."""

    code: str
    message: str
    param: str | None
    line: int | None


class TenantBatchDocument(TypedDict):
    """One batch. `num_requests` is 0 until its file has been checked.

    `num_completed` and `num_failed` count the answers so far. `errors` says why a `failed` batch never ran.
    """

    id: str
    object: Literal["batch"]
    tenant_id: str
    tenant: str
    api_key_id: str
    endpoint: str
    state: BatchState
    num_requests: int
    num_completed: int
    num_failed: int
    errors: list[BatchErrorDocument]
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    metadata: dict[str, str]
    created_at: int
    expires_at: int
    started_at: int | None
    finished_at: int | None


@router.get("")
@paged
async def list_batches(
    services: Services, caller: Reader, paging: Paging, tenant: TenantParam = None
) -> ListDocument[TenantBatchDocument]:
    """List batches, newest first. A key limited to some adapters sees only the batches that it created."""
    tenant_id = await tenant_filter(services, caller, tenant)
    page = await services.call(services.usage.batches.list, tenant_id, *paging, caller.key_ids)
    names = await known_names(services, caller, [found.tenant_id for found in page.data])
    return list_document(page, lambda found: _describe(found, names))


@router.get("/{batch_id}")
async def get_batch(batch_id: str, services: Services, caller: Reader) -> TenantBatchDocument:
    """Get one batch with its progress."""
    return await _described(services, caller, await _find(services, caller, batch_id))


@router.post("/{batch_id}/cancel", responses=errors(409))
async def cancel_batch(batch_id: str, services: Services, caller: Writer) -> TenantBatchDocument:
    """Cancel a batch that has not finished. Requests that are running finish, and all answers are kept."""
    found = await _find(services, caller, batch_id)
    return await _described(services, caller, await services.call(services.usage.batches.cancel, found))


async def _find(services: AdminServices, caller: Caller, batch_id: str) -> Batch:
    found = await services.call(services.usage.batches.get, check_identifier(batch_id, "batch"))
    if found is None or not caller.may_see_key(found.tenant_id, found.api_key_id):
        raise NotFound("there is no such batch", code="batch_not_found")
    return found


async def _described(services: AdminServices, caller: Caller, found: Batch) -> TenantBatchDocument:
    return _describe(found, await known_names(services, caller, [found.tenant_id]))


def _describe(found: Batch, names: Mapping[str, str]) -> TenantBatchDocument:
    return {
        "id": found.id,
        "object": "batch",
        "tenant_id": found.tenant_id,
        "tenant": names.get(found.tenant_id, found.tenant_id),
        "api_key_id": found.api_key_id,
        "endpoint": found.endpoint,
        "state": found.state,
        "num_requests": found.num_lines,
        "num_completed": found.num_completed,
        "num_failed": found.num_failed,
        "errors": [BatchErrorDocument(**asdict(one)) for one in found.errors],  # type: ignore[typeddict-item]
        "input_file_id": found.input_file_id,
        "output_file_id": found.output_file_id if found.is_finished else None,
        "error_file_id": found.error_file_id if found.is_finished else None,
        "metadata": dict(found.labels),
        "created_at": seconds(found.created_us),
        "expires_at": seconds(found.expires_us),
        "started_at": seconds(found.in_progress_us),
        "finished_at": seconds(found.finished_us),
    }
