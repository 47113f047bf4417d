"""Reads the audit log. `migrations/audit.py` writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Row, case, or_, select

from loramux.migrations import schema
from loramux.migrations.database import LONGEST_READ_S, Database
from loramux.migrations.paging import Page, keyset_page
from loramux.platform.accounts.principals import Principal

PLATFORM = "platform"
PERSON = "oidc_"
"""Prefix of the actor for a single sign-on user. A pseudonym follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry:
    """One change. `changes` is `{field: [before, after]}`.

    `tenant_id` is the object's owner, or None for the platform. If the reader belongs to a tenant, `actor` is
    `platform` for a change made with a key of the platform or of another tenant, and `address` is None unless the
    reader or one of the tenant's keys made the change.
    """

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
    """Filters for entries. None means no filter. `action` can end in `.*`. Times are `[start_us, end_us)`."""

    tenant_id: str | None = None
    actor: str | None = None
    action: str | None = None
    target: str | None = None
    start_us: int | None = None
    end_us: int | None = None


class AuditLog:
    def __init__(self, database: Database) -> None:
        self._database = database

    def list(
        self, reader: Principal, wanted: AuditFilter, limit: int, after: str | None = None, before: str | None = None
    ) -> Page[AuditEntry]:
        """List entries, newest first, with only the details that the reader may see."""
        table = schema.audit_log.c
        actor, address = _shown_to(reader)
        others = [column for column in table if column.name not in ("actor", "address")]
        query = select(*others, actor.label("actor"), address.label("address"))
        for column, value in (
            (table.tenant_id, wanted.tenant_id),
            (actor, wanted.actor),
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
        with self._database.read(LONGEST_READ_S) as connection:
            return keyset_page(connection, query, table.id, _entry, limit, after, before)


def _shown_to(reader: Principal) -> tuple[ColumnElement[str], ColumnElement[str | None]]:
    table, keys = schema.audit_log.c, schema.api_keys.c
    if reader.tenant_id is None:
        return table.actor, table.address
    own_keys = select(keys.id).where(keys.tenant_id == reader.tenant_id)
    is_own = or_(table.actor.in_(own_keys), table.actor == reader.key_id)
    is_named = or_(is_own, table.actor == "system", table.actor.startswith(PERSON, autoescape=True))
    return case((is_named, table.actor), else_=PLATFORM), case((is_own, table.address), else_=None)


def _entry(row: Row[Any]) -> AuditEntry:
    return AuditEntry(**row._mapping)
