"""The audit log as it is read: who changed what, when and from where. `migrations/audit.py` writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, select

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.migrations.paging import Page, keyset_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One change; `changes` is {field: [before, after]}. `tenant_id` is whose thing it was, None the platform's."""

    id: str
    created_us: int
    actor: str
    address: str | None
    request_id: str | None
    action: str
    tenant_id: str | None
    target: str
    changes: dict[str, list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditFilter:
    """What is wanted; None is everything. `action` may end in `.*`; times are `[start_us, end_us)`."""

    tenant_id: str | None = None
    actor: str | None = None
    action: str | None = None
    target: str | None = None
    start_us: int | None = None
    end_us: int | None = None


class AuditLog:
    """Reads the entries, which nothing changes or removes."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def list(
        self, wanted: AuditFilter, limit: int, after: str | None = None, before: str | None = None
    ) -> Page[AuditEntry]:
        """Entries, newest first."""
        table = schema.audit_log.c
        query = select(schema.audit_log)
        for column, value in (
            (table.tenant_id, wanted.tenant_id),
            (table.actor, wanted.actor),
            (table.target, wanted.target),
        ):
            if value is not None:
                query = query.where(column == value)
        if wanted.action is not None:
            kind, dot, how = wanted.action.rpartition(".")
            if how == "*":
                query = query.where(table.action.startswith(f"{kind}{dot}", autoescape=True))
            else:
                query = query.where(table.action == wanted.action)
        if wanted.start_us is not None:
            query = query.where(table.created_us >= wanted.start_us)
        if wanted.end_us is not None:
            query = query.where(table.created_us < wanted.end_us)
        with self._database.read() as connection:
            rows, has_more = keyset_rows(connection, query, table.id, limit, after, before)
        return Page(tuple(_entry(row) for row in rows), has_more)


def _entry(row: Row[Any]) -> AuditEntry:
    return AuditEntry(**row._mapping)
