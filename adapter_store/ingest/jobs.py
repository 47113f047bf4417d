"""Presents versions as jobs that are queued, running or finished, with their outcome."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Row, Select, select

from loramux.adapter_store.registry.registry import is_identifier
from loramux.migrations.database import LONGEST_READ_S, Database
from loramux.migrations.paging import Page, keyset_page
from loramux.migrations.schema import adapter_versions, adapters, tenants

JobState = Literal["queued", "running", "succeeded", "failed"]

_VERSION_STATES: Mapping[JobState, tuple[str, ...]] = {
    "queued": ("pending",),
    "running": ("validating",),
    "succeeded": ("ready", "archived", "quarantined"),
    "failed": ("rejected",),
}
_JOB_STATES: Mapping[str, JobState] = {state: job for job, states in _VERSION_STATES.items() for state in states}
UNFINISHED: tuple[JobState, ...] = ("queued", "running")


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestJob:
    """The processing of one version. `server_id` is the server that is processing it now, or None."""

    id: str
    state: JobState
    tenant_id: str
    tenant_slug: str
    adapter_id: str
    adapter_name: str
    version_id: str
    version: int
    server_id: str | None
    claim_expires_us: int | None
    error: Mapping[str, Any] | None
    created_us: int
    finished_us: int | None
    """When the job succeeded, or None."""


class IngestJobs:
    """Lists versions as jobs. Blocking and read-only.

    A job's identifier is its version's identifier, with the prefix `job_` instead of `adv_`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def list(
        self,
        tenant_id: str | None,
        states: tuple[JobState, ...],
        limit: int,
        after: str | None = None,
        before: str | None = None,
        only: Collection[str] | None = None,
    ) -> Page[IngestJob]:
        """List the jobs in these states, newest first. `tenant_id` limits the list to one tenant.

        `only` limits the list to these adapters.
        """
        columns = adapter_versions.c
        wanted = {name for state in states for name in _VERSION_STATES[state]}
        if "ready" in wanted:
            # Nearly all versions are ready, so make the database follow the sort order rather than an index on the
            # state.
            query = _select().where(columns.state.not_in(sorted(_JOB_STATES.keys() - wanted)))
        else:
            query = _select().where(columns.state.in_(sorted(wanted)))
        if tenant_id is not None:
            own = select(adapters.c.id).where(adapters.c.tenant_id == tenant_id)
            query = query.where(columns.adapter_id.in_(own))
        if only is not None:
            query = query.where(columns.adapter_id.in_(only))
        with self._database.read(LONGEST_READ_S) as connection:
            return keyset_page(
                connection, query, adapter_versions.c.id, _job, limit, _version_id(after), _version_id(before)
            )

    def get(self, job_id: str) -> IngestJob | None:
        if not is_identifier(job_id) or not job_id.startswith("job_"):
            return None
        with self._database.read() as connection:
            row = connection.execute(_select().where(adapter_versions.c.id == _version_id(job_id))).one_or_none()
        return _job(row) if row is not None else None


def _version_id(job_id: str | None) -> str | None:
    return None if job_id is None else "adv_" + job_id.partition("_")[2]


def _select() -> Select[*tuple[Any, ...]]:
    columns = adapter_versions.c
    return (
        select(
            columns.id,
            columns.adapter_id,
            columns.number,
            columns.state,
            columns.claimed_by,
            columns.claim_expires_us,
            columns.report,
            columns.created_us,
            columns.ready_us,
            adapters.c.tenant_id,
            adapters.c.name,
            tenants.c.slug,
        )
        .join_from(adapter_versions, adapters)
        .join(tenants, tenants.c.id == adapters.c.tenant_id)
    )


def _job(row: Row[Any]) -> IngestJob:
    return IngestJob(
        id="job_" + row.id.partition("_")[2],
        state=_JOB_STATES[row.state],
        tenant_id=row.tenant_id,
        tenant_slug=row.slug,
        adapter_id=row.adapter_id,
        adapter_name=row.name,
        version_id=row.id,
        version=row.number,
        server_id=row.claimed_by,
        claim_expires_us=row.claim_expires_us,
        error=row.report.get("error"),
        created_us=row.created_us,
        finished_us=row.ready_us,
    )
