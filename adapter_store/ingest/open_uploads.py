"""A tenant's open uploads. An upload is open from its declaration until it is used, cancelled or expired."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, select

from loramux.migrations.schema import adapters, uploads


@dataclass(frozen=True, slots=True)
class OpenUploads:
    """The number of open uploads, and the total of their declared bytes."""

    num_uploads: int
    num_bytes: int
    first_expires_us: int | None
    """When the first of the open uploads will expire, in microseconds since 1970, or None if no upload is open."""


def open_uploads_of(connection: Connection, tenant_id: str, now_us: int) -> OpenUploads:
    """Count a tenant's open uploads at `now_us`, across all its adapters."""
    query = (
        select(uploads.c.files, uploads.c.expires_us)
        .join(adapters, adapters.c.id == uploads.c.adapter_id)
        .where(uploads.c.state == "open", uploads.c.expires_us > now_us, adapters.c.tenant_id == tenant_id)
    )
    rows = connection.execute(query).all()
    num_bytes = sum(int(file["size"]) for row in rows for file in row.files)
    return OpenUploads(len(rows), num_bytes, min((row.expires_us for row in rows), default=None))
