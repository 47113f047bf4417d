"""Lists and cancels the open requests of all gateways that share the database."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, Select, select, update

from loramux.migrations import schema
from loramux.migrations.audit import audit
from loramux.migrations.database import Database
from loramux.migrations.paging import Page, keyset_page


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestInFlight:
    """One admitted, unsettled request. `completion_tokens` is the count at the last checkpoint."""

    id: str
    tenant_id: str
    tenant_slug: str
    api_key_id: str
    adapter_id: str | None
    model: str
    endpoint: str
    prompt_tokens: int
    reserved_tokens: int
    completion_tokens: int
    created_us: int
    cancel_requested_us: int | None


class RequestsInFlight:
    """Lists and cancels requests through their open reservations. Blocking. A gateway has more recent figures for its
    own requests.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def list(
        self,
        tenant_id: str | None,
        limit: int,
        after: str | None = None,
        before: str | None = None,
        only: Collection[str] | None = None,
    ) -> Page[RequestInFlight]:
        """List one tenant's requests, or every tenant's, newest first. `only` restricts the list to requests for these
        adapters.
        """
        query = _select_open()
        if tenant_id is not None:
            query = query.where(schema.reservations.c.tenant_id == tenant_id)
        if only is not None:
            query = query.where(schema.adapter_versions.c.adapter_id.in_(only))
        with self._database.read() as connection:
            return keyset_page(connection, query, schema.reservations.c.id, _request, limit, after, before)

    def get(self, request_id: str) -> RequestInFlight | None:
        with self._database.read() as connection:
            row = connection.execute(_select_open().where(schema.reservations.c.id == request_id)).one_or_none()
        return _request(row) if row is not None else None

    def runs_on(self, adapter_id: str, number: int | None = None) -> bool:
        """Return whether a request runs on one of an adapter's versions, or on this version."""
        table, versions = schema.reservations.c, schema.adapter_versions.c
        query = select(versions.id).where(versions.adapter_id == adapter_id)
        if number is not None:
            query = query.where(versions.number == number)
        found = select(table.id).where(table.state == "open", table.adapter_version_id.in_(query)).limit(1)
        with self._database.read() as connection:
            return connection.execute(found).first() is not None

    def cancel(self, request_id: str) -> RequestInFlight | None:
        """Ask the gateway that runs the request to end the request at its next checkpoint.

        Returns None if the request is not running. Repeated calls keep the time of the first call.
        """
        table = schema.reservations
        with self._database.write() as connection:
            now_us = self._database.now_us(connection)
            asked = connection.execute(
                update(table)
                .where(table.c.id == request_id, table.c.state == "open", table.c.cancel_requested_us.is_(None))
                .values(cancel_requested_us=now_us)
            )
            if asked.rowcount:
                owner = select(table.c.tenant_id).where(table.c.id == request_id).scalar_subquery()
                audit(connection, now_us, "request.cancel", request_id, tenant_id=owner)
        return self.get(request_id)

    def cancel_versions(self, version_ids: Collection[str], tenant_id: str | None) -> Sequence[str]:
        """Ask the gateways to end a tenant's requests on these versions, or every tenant's, as `cancel` does.

        Returns these requests.
        """
        table = schema.reservations
        is_open = table.c.adapter_version_id.in_(version_ids) & (table.c.state == "open")
        if tenant_id is not None:
            is_open &= table.c.tenant_id == tenant_id
        with self._database.write() as connection:
            now_us = self._database.now_us(connection)
            running = select(table.c.id, table.c.tenant_id).where(is_open, table.c.cancel_requested_us.is_(None))
            # Lock in the order in which settlements and checkpoints lock, so that none of them deadlocks with this.
            asked = connection.execute(running.order_by(table.c.id).with_for_update()).all()
            for request_id, owner in asked:
                mine = table.c.id == request_id
                connection.execute(update(table).where(mine).values(cancel_requested_us=now_us))
                audit(connection, now_us, "request.cancel", request_id, tenant_id=owner)
        return [row.id for row in asked]


def _select_open() -> Select[*tuple[Any, ...]]:
    table = schema.reservations
    columns = (
        table.c.id,
        table.c.tenant_id,
        schema.tenants.c.slug.label("tenant_slug"),
        table.c.api_key_id,
        schema.adapter_versions.c.adapter_id,
        table.c.model,
        table.c.endpoint,
        table.c.prompt_tokens,
        table.c.reserved_tokens,
        table.c.checkpoint_tokens.label("completion_tokens"),
        table.c.created_us,
        table.c.cancel_requested_us,
    )
    versions = schema.adapter_versions
    # A request for the base has no version.
    named = table.join(schema.tenants).outerjoin(versions, versions.c.id == table.c.adapter_version_id)
    return select(*columns).select_from(named).where(table.c.state == "open")


def _request(row: Row[Any]) -> RequestInFlight:
    return RequestInFlight(**row._mapping)
