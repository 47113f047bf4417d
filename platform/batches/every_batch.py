"""The batches of all tenants, for administrators."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import select

from loramux.migrations.audit import audit
from loramux.migrations.database import Database
from loramux.migrations.paging import Page, keyset_page
from loramux.migrations.schema import batches
from loramux.platform.batches.batch_rows import Batch, batch_of, cancel_open


class EveryBatch:
    """Lists and cancels the batches of any tenant. Blocking."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def list(
        self,
        tenant_id: str | None,
        limit: int,
        after: str | None = None,
        before: str | None = None,
        key_ids: Collection[str] | None = None,
    ) -> Page[Batch]:
        """List batches, newest first: those of one tenant, or of all. `key_ids` restricts the list to these keys'."""
        query = select(batches)
        if tenant_id is not None:
            query = query.where(batches.c.tenant_id == tenant_id)
        if key_ids is not None:
            query = query.where(batches.c.api_key_id.in_(key_ids))
        with self._database.read() as connection:
            return keyset_page(connection, query, batches.c.id, batch_of, limit, after, before)

    def get(self, batch_id: str) -> Batch | None:
        with self._database.read() as connection:
            row = connection.execute(select(batches).where(batches.c.id == batch_id)).one_or_none()
        return None if row is None else batch_of(row)

    def cancel(self, batch: Batch) -> Batch:
        """Cancel a batch. Requests that are running finish. Raises Conflict if the batch has finished."""
        with self._database.write() as connection:
            now_us = self._database.now_us(connection)
            found, is_changed = cancel_open(connection, batch.id, now_us)
            if is_changed:
                audit(connection, now_us, "batch.cancel", batch.id, tenant_id=batch.tenant_id)
        return found
