"""Caps on one tenant's open uploads and pending versions, independent of its quotas."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from loramux.adapter_store.errors import LimitReached
from loramux.adapter_store.ingest.open_uploads import open_uploads_of
from loramux.adapter_store.registry.records import UNFINISHED
from loramux.migrations.schema import adapter_versions, adapters, uploads

MAX_OPEN_UPLOADS = 64
"""Maximum number of open uploads per tenant."""
MAX_OPEN_LARGEST = 16
"""Limit on the bytes declared by a tenant's open uploads, in multiples of the largest possible upload."""
MAX_PENDING_VERSIONS = 64
"""Maximum number of versions per tenant that are waiting for validation or being validated."""

UPLOAD_RETRY_S = 60.0
"""Longest retry delay for a tenant with too many open uploads, in seconds.

An upload may be used or cancelled well before it expires, so clients should not wait until then.
"""
VERSION_RETRY_S = 2.0
"""Retry delay for a tenant with too many pending versions, in seconds. A validation takes about one second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCaps:
    """Checks the caps. The caller must hold the lock on the tenant's row, which serializes concurrent additions."""

    max_open_bytes: int
    max_open_uploads: int = MAX_OPEN_UPLOADS
    max_pending_versions: int = MAX_PENDING_VERSIONS

    def check_upload(self, connection: Connection, tenant_id: str, num_bytes: int, now_us: int) -> None:
        held = open_uploads_of(connection, tenant_id, now_us)
        if held.num_uploads < self.max_open_uploads and held.num_bytes + num_bytes <= self.max_open_bytes:
            return
        wait_us = now_us if held.first_expires_us is None else held.first_expires_us
        raise LimitReached(
            "too_many_open_uploads",
            f"{held.num_uploads} uploads with {held.num_bytes} bytes are open; a tenant may have at most "
            f"{self.max_open_uploads} open uploads with {self.max_open_bytes} bytes in total: use or cancel one first",
            min(UPLOAD_RETRY_S, (wait_us - now_us) / 1_000_000),
        )

    def check_version(self, connection: Connection, tenant_id: str) -> None:
        """Raise LimitReached if another version from the tenant's own uploads would exceed the cap."""
        columns = adapter_versions.c
        # Versions that an operator creates from a bucket or a hub do not count toward the cap.
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
                f"{num_pending} versions are waiting for validation, which is the maximum per tenant",
                VERSION_RETRY_S,
            )
