"""The adapters that a key is limited to, from the names that its maker gave."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, exists, or_, select

from loramux.adapter_store.registry.registry import is_identifier
from loramux.migrations.schema import adapter_grants, adapters, tenants
from loramux.platform.accounts.tenants import SLUG
from loramux.platform.errors import NotFound


def find_adapter_ids(connection: Connection, tenant_id: str, names: Sequence[str]) -> list[str]:
    """Identifiers of adapters that the tenant may call, each given as identifier or `[tenant/]name`.

    Raises NotFound; one that it may not call is as unknown as one that does not exist.
    """
    return sorted({_find(connection, tenant_id, name) for name in names})


def _find(connection: Connection, tenant_id: str, name: str) -> str:
    is_granted = exists().where(adapter_grants.c.adapter_id == adapters.c.id, adapter_grants.c.tenant_id == tenant_id)
    query = select(adapters.c.id).where(or_(adapters.c.tenant_id == tenant_id, is_granted))
    owner, slash, short = name.rpartition("/")
    found = None
    if is_identifier(name):
        found = connection.execute(query.where(adapters.c.id == name)).scalar()
    elif slash and SLUG.fullmatch(owner) and SLUG.fullmatch(short):
        named = query.join(tenants, tenants.c.id == adapters.c.tenant_id)
        found = connection.execute(named.where(tenants.c.slug == owner, adapters.c.name == short)).scalar()
    elif not slash and SLUG.fullmatch(name):
        own = query.where(adapters.c.tenant_id == tenant_id, adapters.c.name == name)
        found = connection.execute(own).scalar()
    if found is None:
        raise NotFound("the tenant may call no such adapter", param="adapters", code="adapter_not_found")
    return str(found)
