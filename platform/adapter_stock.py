"""What a tenant keeps: how many adapters, and how many bytes of them."""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from loramux.migrations import schema
from loramux.platform.quota_metrics import ADAPTERS

_adapters, _versions, _uploads = schema.adapters, schema.adapter_versions, schema.uploads


def stock_of(connection: Connection, tenant_id: str, metric: str) -> int:
    """How much a tenant has of `adapters` or `adapter_bytes`.

    A version counts with its canonical bytes, and while it is being validated with what its upload announced.
    """
    if metric == ADAPTERS:
        query = select(func.count()).select_from(_adapters).where(_adapters.c.tenant_id == tenant_id)
        return int(connection.execute(query).scalar_one())
    of_tenant = _versions.join(_adapters, _adapters.c.id == _versions.c.adapter_id)
    known = select(func.coalesce(func.sum(_versions.c.canonical_bytes), 0)).select_from(of_tenant)
    num_bytes = int(connection.execute(known.where(_adapters.c.tenant_id == tenant_id)).scalar_one())
    announced = (
        select(_uploads.c.files)
        .select_from(of_tenant.join(_uploads, _uploads.c.id == _versions.c.upload_id))
        .where(_adapters.c.tenant_id == tenant_id, _versions.c.state.in_(("pending", "validating")))
    )
    return num_bytes + sum(int(file["size"]) for (files,) in connection.execute(announced) for file in files)
