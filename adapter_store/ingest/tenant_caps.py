"""How much one tenant may have on its way into the store at once, whatever its quotas say."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from loramux.adapter_store.errors import LimitReached
from loramux.adapter_store.ingest.open_uploads import open_uploads_of
from loramux.adapter_store.registry.records import UNFINISHED
from loramux.migrations.schema import adapter_versions, adapters, uploads

MAX_OPEN_UPLOADS = 64
"""Open uploads of one tenant."""
MAX_OPEN_LARGEST = 16
"""Bytes that the open uploads of one tenant may declare, in adapters of the largest size that the base takes."""
MAX_PENDING_VERSIONS = 64
"""Versions of one tenant that wait for validation or are in it."""

UPLOAD_RETRY_S = 60.0
"""Longest time after which a tenant with too many open uploads may try again: one of them may be used or cancelled."""
VERSION_RETRY_S = 2.0
"""The same for pending versions: a validation takes about a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCaps:
    """The caps. The caller holds the tenant's row, so that two that add at once take turns."""

    max_open_bytes: int
    max_open_uploads: int = MAX_OPEN_UPLOADS
    max_pending_versions: int = MAX_PENDING_VERSIONS

    def check_upload(self, connection: Connection, tenant_id: str, num_bytes: int, now_us: int) -> None:
        """Raise LimitReached where an upload of `num_bytes` is one too many."""
        held = open_uploads_of(connection, tenant_id, now_us)
        if held.num_uploads < self.max_open_uploads and held.num_bytes + num_bytes <= self.max_open_bytes:
            return
        wait_us = now_us if held.first_expires_us is None else held.first_expires_us
        raise LimitReached(
            "too_many_open_uploads",
            f"{held.num_uploads} uploads of {held.num_bytes} bytes are open, and a tenant may have "
            f"{self.max_open_uploads} of {self.max_open_bytes} bytes: use or cancel one first",
            min(UPLOAD_RETRY_S, (wait_us - now_us) / 1_000_000),
        )

    def check_version(self, connection: Connection, tenant_id: str) -> None:
        """Raise LimitReached where another version of the tenant's own uploads is one too many."""
        columns = adapter_versions.c
        # What an operator has taken from a bucket is not the tenant's doing.
        query = (
            select(func.count())
            .select_from(adapter_versions.join(adapters, adapters.c.id == columns.adapter_id))
            .join(uploads, uploads.c.id == columns.upload_id)
            .where(columns.state.in_(UNFINISHED), adapters.c.tenant_id == tenant_id, uploads.c.source_url.is_(None))
        )
        num_pending = connection.execute(query).scalar_one()
        if num_pending >= self.max_pending_versions:
            raise LimitReached(
                "too_many_pending_versions",
                f"{num_pending} versions wait for validation, which is as many as a tenant may have",
                VERSION_RETRY_S,
            )
