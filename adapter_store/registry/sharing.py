"""Grants, which let other tenants call an adapter."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, delete, insert, select
from sqlalchemy.exc import IntegrityError

from loramux.adapter_store.errors import GrantNotFound, InvalidGrant, TenantNotFound
from loramux.adapter_store.registry.records import Adapter, Grant
from loramux.adapter_store.registry.registry import SLUG, is_identifier, owner_of
from loramux.migrations.audit import audit
from loramux.migrations.database import Database
from loramux.migrations.schema import adapter_grants, tenants


class AdapterGrants:
    """Grants to other tenants, which then call the adapter by its full name and pay for their own calls.

    Only the owner can change the adapter.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def list(self, adapter_id: str) -> list[Grant]:
        with self._database.read() as connection:
            rows = connection.execute(
                _select().where(adapter_grants.c.adapter_id == adapter_id).order_by(tenants.c.slug)
            )
            return [Grant(*row) for row in rows]

    def add(self, adapter: Adapter, tenant_id: str) -> Grant:
        """Let a tenant call an adapter. A repeated grant changes nothing. Raises InvalidGrant or TenantNotFound."""
        if tenant_id == adapter.tenant_id:
            raise InvalidGrant("own_adapter", "the adapter already belongs to this tenant", "tenant")
        if not is_identifier(tenant_id):
            raise TenantNotFound("there is no such tenant")
        key = {"adapter_id": adapter.id, "tenant_id": tenant_id}
        try:
            with self._database.write() as connection:
                if connection.execute(select(tenants.c.id).where(tenants.c.id == tenant_id)).first() is None:
                    raise TenantNotFound("there is no such tenant")
                now_us = self._database.now_us(connection)
                connection.execute(insert(adapter_grants).values(**key, created_us=now_us))
                after = {"granted_to": tenant_id}
                audit(connection, now_us, "grant.add", adapter.id, tenant_id=adapter.tenant_id, after=after)
        except IntegrityError:
            # The adapter is already granted to the tenant.
            pass
        with self._database.read() as connection:
            of_tenant = _select().where(
                adapter_grants.c.adapter_id == adapter.id, adapter_grants.c.tenant_id == tenant_id
            )
            return Grant(*connection.execute(of_tenant).one())

    def remove(self, adapter_id: str, tenant: str) -> None:
        """Revoke a grant for future requests. Raises GrantNotFound.

        `tenant` is an identifier or a slug. The same statement runs whether or not the tenant exists, so that its
        duration does not reveal to the owner which tenants exist.
        """
        refusal = GrantNotFound("the tenant was not granted the adapter")
        if not SLUG.fullmatch(tenant):
            raise refusal
        table = adapter_grants
        # A slug can look like another tenant's identifier. The identifier takes precedence.
        named = select(tenants.c.id).where((tenants.c.id == tenant) | (tenants.c.slug == tenant))
        found = named.order_by((tenants.c.id == tenant).desc()).limit(1).scalar_subquery()
        one = delete(table).where(table.c.adapter_id == adapter_id, table.c.tenant_id == found)
        with self._database.write() as connection:
            tenant_id = connection.execute(one.returning(table.c.tenant_id)).scalar_one_or_none()
            if tenant_id is None:
                raise refusal
            now_us, before = self._database.now_us(connection), {"granted_to": tenant_id}
            audit(connection, now_us, "grant.remove", adapter_id, tenant_id=owner_of(adapter_id), before=before)


def _select() -> Select[*tuple[Any, ...]]:
    table = adapter_grants.c
    return select(table.adapter_id, table.tenant_id, tenants.c.slug, table.created_us).join(
        tenants, tenants.c.id == table.tenant_id
    )
