"""Maps digests, which identify adapters in the engine, to adapter versions."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import String, bindparam, cast, func, select
from sqlalchemy.dialects.postgresql import ARRAY

from loramux.migrations.database import Database
from loramux.migrations.schema import adapter_versions, adapters, tenants


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestOwner:
    """A version with a given digest."""

    tenant_id: str
    tenant_slug: str
    adapter_id: str
    adapter_name: str
    version: int
    is_pinned: bool = False


def owners_of(
    database: Database, digests: Sequence[str], tenant_id: str | None, only: Collection[str] | None = None
) -> Mapping[str, Sequence[DigestOwner]]:
    """Return the versions with each digest, oldest first. Blocking.

    `tenant_id` limits the result to that tenant's versions, `only` to versions of these adapters.
    """
    columns = adapter_versions.c
    query = (
        select(
            columns.digest,
            columns.adapter_id,
            columns.number,
            columns.pinned_us,
            adapters.c.tenant_id,
            adapters.c.name,
            tenants.c.slug,
        )
        .join_from(adapter_versions, adapters)
        .join(tenants, tenants.c.id == adapters.c.tenant_id)
        .order_by(columns.id)
    )
    if tenant_id is not None:
        query = query.where(adapters.c.tenant_id == tenant_id)
    if only is not None:
        query = query.where(columns.adapter_id.in_(only))
    # Pass all digests as one parameter, so that the statement is the same for any number of them.
    if database.is_sqlite:
        wanted = func.json_each(bindparam("digests")).table_valued("value")
        query = query.where(columns.digest.in_(select(wanted.c.value)))
        value: object = json.dumps(list(digests))
    else:
        query = query.where(columns.digest == func.any(cast(bindparam("digests"), ARRAY(String))))
        value = list(digests)
    owners: dict[str, list[DigestOwner]] = {}
    for row in database.query(query, {"digests": value}):
        owner = DigestOwner(
            tenant_id=row.tenant_id,
            tenant_slug=row.slug,
            adapter_id=row.adapter_id,
            adapter_name=row.name,
            version=row.number,
            is_pinned=row.pinned_us is not None,
        )
        owners.setdefault(row.digest, []).append(owner)
    return owners
