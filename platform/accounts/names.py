"""Looks up the names by which people know tenants, adapters, versions and keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import ColumnElement, Select, or_, select

from loramux.migrations.database import Database
from loramux.migrations.schema import adapter_grants, adapter_versions, adapters, api_keys, tenants

MAX_IN_QUERY = 500
"""Maximum number of identifiers in one statement."""


def names_of(database: Database, ids: Iterable[str | None], tenant_id: str | None = None) -> Mapping[str, str]:
    """Return names by identifier: a tenant's slug, `tenant/adapter`, `tenant/adapter@version`, and a key's name with
    the end of its identifier, because several keys can have one name.

    Other identifiers are absent, and so are those of purged objects. With `tenant_id`, only objects that this tenant
    may know are named: the tenant itself, its keys and adapters, and the adapters that it may call. Blocking.
    """
    by_kind: dict[str, set[str]] = {}
    for one in ids:
        if one is not None and one[:4] in _QUERIES:
            by_kind.setdefault(one[:4], set()).add(one)
    names: dict[str, str] = {}
    with database.read() as connection:
        for kind, wanted in by_kind.items():
            query, column, owner = _QUERIES[kind]
            if tenant_id is not None:
                query = query.where(_is_known(kind, owner, tenant_id))
            listed = sorted(wanted)
            for start in range(0, len(listed), MAX_IN_QUERY):
                part = listed[start : start + MAX_IN_QUERY]
                for row in connection.execute(query.where(column.in_(part))):
                    names[row[0]] = _name(kind, *row)
    return names


def _name(kind: str, one: str, name: str, number: int | None = None) -> str:
    if kind == "key_":
        return f"{name} (key_…{one[-6:]})"
    return name if number is None else f"{name}@{number}"


def _is_known(kind: str, owner: ColumnElement[Any], tenant_id: str) -> ColumnElement[bool]:
    is_own = owner == tenant_id
    if kind not in ("ada_", "adv_"):
        return is_own
    granted = select(adapter_grants.c.adapter_id).where(adapter_grants.c.tenant_id == tenant_id)
    return or_(is_own, adapters.c.id.in_(granted))


_MODEL = tenants.c.slug + "/" + adapters.c.name
_WITH_TENANT = adapters.join(tenants, tenants.c.id == adapters.c.tenant_id)
_QUERIES: Mapping[str, tuple[Select[*tuple[Any, ...]], ColumnElement[str], ColumnElement[Any]]] = {
    "ten_": (select(tenants.c.id, tenants.c.slug), tenants.c.id, tenants.c.id),
    "ada_": (select(adapters.c.id, _MODEL).select_from(_WITH_TENANT), adapters.c.id, adapters.c.tenant_id),
    "adv_": (
        select(adapter_versions.c.id, _MODEL, adapter_versions.c.number).select_from(
            _WITH_TENANT.join(adapter_versions, adapter_versions.c.adapter_id == adapters.c.id)
        ),
        adapter_versions.c.id,
        adapters.c.tenant_id,
    ),
    "key_": (select(api_keys.c.id, api_keys.c.name), api_keys.c.id, api_keys.c.tenant_id),
}
"""By kind: the identifiers and names, and the columns of the identifier and the owner."""
