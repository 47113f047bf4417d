"""Whose versions a digest is: the engine knows digests alone, and people know names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import select

from loramux.migrations.database import Database
from loramux.migrations.schema import adapter_versions, adapters, tenants

_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestOwner:
    """One version that has the digest."""

    tenant_id: str
    tenant_slug: str
    adapter_id: str
    adapter_name: str
    version: int


def owners_of(database: Database, digests: Sequence[str], tenant_id: str | None) -> Mapping[str, Sequence[DigestOwner]]:
    """The versions that have each digest, the oldest first; with a tenant, only its own. Blocking."""
    columns = adapter_versions.c
    query = (
        select(
            columns.digest, adapters.c.tenant_id, tenants.c.slug, columns.adapter_id, adapters.c.name, columns.number
        )
        .join_from(adapter_versions, adapters)
        .join(tenants, tenants.c.id == adapters.c.tenant_id)
        .order_by(columns.id)
    )
    if tenant_id is not None:
        query = query.where(adapters.c.tenant_id == tenant_id)
    owners: dict[str, list[DigestOwner]] = {}
    with database.read() as connection:
        for start in range(0, len(digests), _AT_ONCE):
            for row in connection.execute(query.where(columns.digest.in_(digests[start : start + _AT_ONCE]))):
                owner = DigestOwner(
                    tenant_id=row.tenant_id,
                    tenant_slug=row.slug,
                    adapter_id=row.adapter_id,
                    adapter_name=row.name,
                    version=row.number,
                )
                owners.setdefault(row.digest, []).append(owner)
    return owners
