"""`/jobs`: validation jobs for new versions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from typing_extensions import TypedDict

from loramux.adapter_store.ingest.jobs import UNFINISHED, IngestJob, JobState
from loramux.admin.rest.access import Reader, Services, tenant_filter
from loramux.admin.rest.listing import ListDocument, Paging, TenantParam, list_document, paged, seconds
from loramux.platform.errors import NotFound

router = APIRouter(prefix="/jobs", tags=["jobs"])


class JobDocument(TypedDict):
    """The validation of one version. The job's identifier is the version's identifier with the prefix `job_`."""

    id: str
    object: Literal["job"]
    kind: Literal["validation"]
    state: JobState
    tenant_id: str
    tenant: str
    adapter_id: str
    model: str
    version_id: str
    version: int
    server_id: str | None
    error: dict[str, Any] | None
    created_at: int
    finished_at: int | None


@router.get("")
@paged
async def list_jobs(
    services: Services,
    caller: Reader,
    paging: Paging,
    tenant: TenantParam = None,
    state: Annotated[JobState | None, Query(description="Default: unfinished jobs.")] = None,
) -> ListDocument[JobDocument]:
    """List validation jobs, newest first."""
    tenant_id = await tenant_filter(services, caller, tenant)
    states = UNFINISHED if state is None else (state,)
    page = await services.call(services.adapters.jobs.list, tenant_id, states, *paging, caller.adapter_ids)
    return list_document(page, describe_job)


@router.get("/{job_id}")
async def get_job(job_id: str, services: Services, caller: Reader) -> JobDocument:
    """Get one job, whatever its state."""
    job = await services.call(services.adapters.jobs.get, job_id)
    if job is None or not caller.may_see_adapter(job.tenant_id, job.adapter_id):
        raise NotFound("there is no such job", code="job_not_found")
    return describe_job(job)


def describe_job(job: IngestJob) -> JobDocument:
    return {
        "id": job.id,
        "object": "job",
        "kind": "validation",
        "state": job.state,
        "tenant_id": job.tenant_id,
        "tenant": job.tenant_slug,
        "adapter_id": job.adapter_id,
        "model": f"{job.tenant_slug}/{job.adapter_name}@{job.version}",
        "version_id": job.version_id,
        "version": job.version,
        "server_id": job.server_id,
        "error": None if job.error is None else dict(job.error),
        "created_at": seconds(job.created_us),
        "finished_at": seconds(job.finished_us),
    }
