"""Stores responses in the database."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, insert, select

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.stored_responses.sealing import ContentTooLong, Sealing, is_possible_id

DAY_US = 24 * 3600 * 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response object, and the items of its whole conversation before its output, each with an ID."""

    id: str
    tenant_id: str
    adapter_id: str | None
    """The adapter that answered. None for the base."""
    input: list[dict[str, Any]]
    response: dict[str, Any]


class ResponseStore:
    """Without a secret in `sealing`, nothing is stored, and no stored response can be read. Blocking."""

    def __init__(self, database: Database, sealing: Sealing) -> None:
        self._database = database
        self._sealing = sealing

    def put(self, stored: StoredResponse, days: int) -> bool:
        """Store a response for a number of days. Return False if it is too long."""
        document = {"input": stored.input, "response": stored.response}
        try:
            sealed = self._sealing.seal(stored.tenant_id, stored.id, document)
        except ContentTooLong:
            return False
        with self._database.write() as connection:
            now_us = self._database.now_us(connection)
            connection.execute(
                insert(schema.responses).values(
                    id=stored.id,
                    tenant_id=stored.tenant_id,
                    adapter_id=stored.adapter_id,
                    created_us=now_us,
                    expires_us=now_us + days * DAY_US,
                    content=sealed,
                )
            )
        return True

    def get(self, tenant_id: str, response_id: str) -> StoredResponse | None:
        """Return a tenant's response, or None if it does not exist, has expired, or was encrypted with another
        secret.
        """
        table = schema.responses
        if not self._sealing.is_open or not is_possible_id(response_id):
            return None
        with self._database.read() as connection:
            query = select(table).where(table.c.id == response_id, table.c.tenant_id == tenant_id)
            row = connection.execute(query).one_or_none()
            if row is None or row.expires_us <= self._database.now_us(connection):
                return None
        document = self._sealing.open(tenant_id, response_id, row.content)
        if document is None:
            return None
        return StoredResponse(id=response_id, tenant_id=tenant_id, adapter_id=row.adapter_id, **document)

    def delete(self, tenant_id: str, response_id: str) -> None:
        table = schema.responses
        with self._database.write() as connection:
            connection.execute(delete(table).where(table.c.id == response_id, table.c.tenant_id == tenant_id))
