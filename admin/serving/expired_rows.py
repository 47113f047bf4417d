"""Deletes expired rows: idempotency keys, console sessions, failed sign-ins, what is stored for tenants, and the
isolation keys of deleted tenants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Column, Connection, Select, Table, delete, select, tuple_

from loramux.admin.console.sessions.sessions import MAX_AHEAD_US
from loramux.migrations.database import Database
from loramux.migrations.schema import (
    chat_completions,
    console_sessions,
    conversations,
    idempotency_keys,
    login_failures,
    prefix_purges,
    response_events,
    responses,
    stored_bytes,
)
from loramux.migrations.storage_triggers import SIZES

UNTIL: Sequence[Column[int]] = (
    idempotency_keys.c.expires_us,
    console_sessions.c.expires_us,
    login_failures.c.forgiven_us,
    responses.c.expires_us,
    response_events.c.expires_us,
    chat_completions.c.expires_us,
    conversations.c.expires_us,
    prefix_purges.c.expires_us,
)
"""The expiry column of each table. Every column is indexed."""

AT_ONCE_BELOW: Mapping[str, int] = {conversations.name: 10, responses.name: 100}
"""Batches of tables whose rows take many rows of another table with them."""


class ExpiredRows:
    """Sweeps the tables in batches of `at_once` rows, so that no transaction holds its locks for long. Blocking."""

    def __init__(self, database: Database, until: Sequence[Column[int]] = UNTIL, at_once: int = 1000) -> None:
        self._database = database
        self._until = until
        self._at_once = at_once

    def sweep(self) -> Mapping[str, int]:
        """Delete expired rows and return their number by table. Several servers can sweep concurrently."""
        return {until.table.name: self._sweep(until.table, until) for until in self._until}

    def _sweep(self, table: Table, until: Column[int]) -> int:
        key = tuple_(*table.primary_key)
        at_once = min(self._at_once, AT_ONCE_BELOW.get(table.name, self._at_once))
        total = 0
        while True:
            with self._database.write() as connection:
                now_us = self._database.now_us(connection)
                is_over = until <= now_us
                if until is console_sessions.c.expires_us:
                    is_over |= until > now_us + MAX_AHEAD_US
                some = select(*table.primary_key).where(is_over).limit(at_once)
                # Skip locked rows, which another server is deleting or a request is extending.
                found = some.with_for_update(skip_locked=True)
                swept = table.c.id.in_(_counted(connection, table, found)) if table.name in SIZES else key.in_(found)
                num_swept = connection.execute(delete(table).where(swept)).rowcount
            total += num_swept
            if num_swept < at_once:
                return total


def _counted(connection: Connection, table: Table, found: Select[Any]) -> list[str]:
    """Return the keys of rows whose bytes are counted. The counters of their tenants are locked in order, because the
    sweeps of two servers could deadlock otherwise.
    """
    rows = connection.execute(found.add_columns(table.c.tenant_id)).all()
    counters = stored_bytes.c.tenant_id
    locked = select(counters).where(counters.in_({row.tenant_id for row in rows})).order_by(counters)
    connection.execute(locked.with_for_update())
    return [row.id for row in rows]
