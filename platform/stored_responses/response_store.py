"""Stores responses in the database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.quotas.metrics import STORED_BYTES
from loramux.platform.quotas.stock import StockLimits
from loramux.platform.stored_responses.sealing import ContentTooLong, Sealing, is_possible_id

DAY_US = 24 * 3600 * 1_000_000
UNFINISHED = ("queued", "in_progress", "cancelling")
"""States of a response in the background while a server runs it."""
START_GRACE_US = 60 * 1_000_000
"""Longest time between storing a response in the background and reserving quota for it, in microseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """A response object, and the items of its whole conversation before its output, each with an ID."""

    id: str
    tenant_id: str
    adapter_id: str | None
    """The adapter that answered. None for the base."""
    input: list[dict[str, Any]]
    response: dict[str, Any]
    earlier_adapter_ids: Sequence[str | None] = ()
    """The adapters of the stored responses and conversations from which items of the input come."""
    state: str | None = None
    """None unless the response was made in the background."""
    num_events: int | None = None
    """Number of events of its stream that have been stored. None if they are not stored."""
    is_lost: bool = False
    """True if no server runs the unfinished response any more."""

    @property
    def adapter_ids(self) -> tuple[str | None, ...]:
        """All adapters whose answers are in the input or the output. None stands for the base."""
        return (self.adapter_id, *self.earlier_adapter_ids)

    @property
    def is_unfinished(self) -> bool:
        return self.state in UNFINISHED

    @property
    def request_id(self) -> str:
        return request_id_of(self.id)


def request_id_of(response_id: str) -> str:
    """Return the ID of the request that makes a response."""
    return response_id.replace("resp_", "req_", 1)


class ResponseStore:
    """Without a secret in `sealing`, nothing is stored, and no stored response can be read. Blocking."""

    def __init__(self, database: Database, sealing: Sealing) -> None:
        self._database = database
        self._sealing = sealing

    def put(self, stored: StoredResponse, days: int) -> bool:
        """Store a response for a number of days. Return False if it is too long. Raises QuotaExceeded."""
        try:
            content = sealed_content(self._sealing, stored)
        except ContentTooLong:
            return False
        with self._database.write() as connection:
            hold_tenant(connection, stored.tenant_id)
            insert_response(connection, stored, content, self._database.now_us(connection), days)
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
            now_us = self._database.now_us(connection)
            if row is None or row.expires_us <= now_us:
                return None
            is_lost = row.background_state in UNFINISHED and is_request_lost(connection, row, now_us)
        document = self._sealing.open(tenant_id, response_id, row.content)
        if document is None:
            return None
        state = row.background_state
        if state in UNFINISHED:
            document["response"]["status"] = "cancelled" if state == "cancelling" else state
        return StoredResponse(
            id=response_id,
            tenant_id=tenant_id,
            adapter_id=row.adapter_id,
            state=state,
            num_events=row.num_events,
            is_lost=is_lost,
            input=document["input"],
            response=document["response"],
            earlier_adapter_ids=tuple(document.get("earlier_adapter_ids", ())),
        )

    def delete(self, tenant_id: str, response_id: str) -> None:
        table = schema.responses
        with self._database.write() as connection:
            connection.execute(delete(table).where(table.c.id == response_id, table.c.tenant_id == tenant_id))


def sealed_content(sealing: Sealing, stored: StoredResponse) -> bytes:
    """Return the encrypted content of a response's row. Raises ContentTooLong."""
    document: dict[str, Any] = {"input": stored.input, "response": stored.response}
    others = [one for one in stored.earlier_adapter_ids if one != stored.adapter_id]
    # Servers of earlier versions, which run during an upgrade, cannot read a row with this field.
    if others:
        document["earlier_adapter_ids"] = others
    return sealing.seal(stored.tenant_id, stored.id, document)


def admit_bytes(connection: Connection, tenant_id: str, num_bytes: int, now_us: int) -> None:
    """Let a tenant store more bytes, or raise QuotaExceeded. Concurrent additions take turns."""
    if num_bytes > 0:
        StockLimits().admit(connection, tenant_id, STORED_BYTES, num_bytes, now_us)


def hold_tenant(connection: Connection, tenant_id: str) -> None:
    """Lock a tenant's row as a new row's foreign key does. Call it before `admit_bytes`.

    A transaction that deletes the tenant locks this row before the counters of quotas, so the two cannot deadlock.
    """
    held = select(schema.tenants.c.id).where(schema.tenants.c.id == tenant_id)
    connection.execute(held.with_for_update(read=True, key_share=True))


def insert_response(connection: Connection, stored: StoredResponse, content: bytes, now_us: int, days: int) -> None:
    """Store a response whose tenant is locked. Raises QuotaExceeded."""
    admit_bytes(connection, stored.tenant_id, len(content), now_us)
    connection.execute(
        insert(schema.responses).values(
            id=stored.id,
            tenant_id=stored.tenant_id,
            adapter_id=stored.adapter_id,
            created_us=now_us,
            expires_us=now_us + days * DAY_US,
            content=content,
            background_state=stored.state,
            num_events=stored.num_events,
        )
    )


def is_request_lost(connection: Connection, row: Row[*tuple[Any, ...]], now_us: int) -> bool:
    """Return whether the request of an unfinished response was recovered or never began.

    A server stores the finished response before it settles the request, so the caller must then read the row again.
    """
    table = schema.reservations
    query = select(table.c.id).where(table.c.id == request_id_of(row.id), table.c.state == "open")
    return connection.execute(query).first() is None and row.created_us < now_us - START_GRACE_US
