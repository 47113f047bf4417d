"""The bases that servers on one database serve, and the verdicts on each version for each base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, delete, func, insert, literal, select, text

from loramux.adapter_store.errors import BaseNotFound
from loramux.adapter_store.registry.records import BaseVerdict
from loramux.migrations.database import LONGEST_READ_S, Database
from loramux.migrations.paging import Page, keyset_rows
from loramux.migrations.schema import adapter_versions, adapters, bases, tenants, version_bases
from loramux.migrations.upserts import upsert

_TAKEN_OVER = ("ready", "archived", "quarantined")
"""States of versions that the first base has been serving or can serve again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A base that a server has served, with the numbers of ready versions by verdict."""

    id: str
    served_name: str
    created_us: int
    num_validated: int
    num_rejected: int
    num_pending: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RejectedVersion:
    """A ready version that is not valid for a base."""

    version_id: str
    tenant_id: str
    tenant_slug: str
    adapter_id: str
    adapter_name: str
    version: int
    code: str
    message: str
    checked_us: int


class Bases:
    """Registers bases and reports on their versions. Blocking."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def register(self, base_id: str, served_name: str) -> None:
        """Record that a server serves this base.

        The first base to register counts as validated for all existing versions, because they were accepted when each
        database had one base.
        """
        with self._database.write() as connection:
            if not self._database.is_sqlite:
                # Only one base can be the first.
                connection.execute(text("LOCK TABLE bases IN SHARE ROW EXCLUSIVE MODE"))
            now_us = self._database.now_us(connection)
            is_first = connection.execute(select(bases.c.id).limit(1)).first() is None
            row = {"id": base_id, "served_name": served_name, "created_us": now_us}
            statement = upsert(connection, bases).values(row)
            connection.execute(
                statement.on_conflict_do_update(index_elements=["id"], set_={"served_name": served_name})
            )
            if is_first:
                columns = adapter_versions.c
                taken_over = select(columns.id, literal(base_id), literal("ready"), literal(now_us)).where(
                    columns.state.in_(_TAKEN_OVER)
                )
                names = ["version_id", "base_id", "state", "checked_us"]
                connection.execute(insert(version_bases).from_select(names, taken_over))

    def list(self) -> Sequence[Base]:
        """List all bases, oldest first."""
        num_ready = select(func.count()).select_from(adapter_versions).where(adapter_versions.c.state == "ready")
        with self._database.read(LONGEST_READ_S) as connection:
            rows = connection.execute(select(bases).order_by(bases.c.created_us, bases.c.id)).all()
            total = connection.execute(num_ready).scalar_one()
            return [_base(row.id, row.served_name, row.created_us, _decided(connection, row.id), total) for row in rows]

    def get(self, base_id: str) -> Base:
        """Return one base. Raises BaseNotFound."""
        found = next((base for base in self.list() if base.id == base_id), None)
        if found is None:
            raise BaseNotFound("there is no such base")
        return found

    def rejected(
        self, base_id: str, limit: int, after: str | None = None, before: str | None = None
    ) -> Page[RejectedVersion]:
        """List the ready versions that were rejected for a base, newest first. `after` and `before` are version
        identifiers.
        """
        columns = version_bases.c
        query = (
            select(
                columns.version_id,
                adapters.c.tenant_id,
                tenants.c.slug.label("tenant_slug"),
                adapter_versions.c.adapter_id,
                adapters.c.name.label("adapter_name"),
                adapter_versions.c.number.label("version"),
                columns.code,
                columns.message,
                columns.checked_us,
            )
            .join_from(version_bases, adapter_versions)
            .join(adapters, adapters.c.id == adapter_versions.c.adapter_id)
            .join(tenants, tenants.c.id == adapters.c.tenant_id)
            .where(columns.base_id == base_id, columns.state == "rejected", adapter_versions.c.state == "ready")
        )
        with self._database.read(LONGEST_READ_S) as connection:
            rows, has_more = keyset_rows(connection, query, columns.version_id, limit, after, before)
        return Page(tuple(RejectedVersion(**row._mapping) for row in rows), has_more)

    def verdict(self, version_id: str, base_id: str) -> BaseVerdict:
        columns = version_bases.c
        query = select(columns.state).where(columns.version_id == version_id, columns.base_id == base_id)
        with self._database.read() as connection:
            state = connection.execute(query).scalar()
        return state if state in ("ready", "rejected") else "pending"


def note_validated(connection: Connection, version_id: str, base_id: str, now_us: int) -> None:
    """Record that a version is valid for a base."""
    verdict = {"state": "ready", "claimed_by": None, "claim_expires_us": None, "code": None, "message": None}
    values = {**verdict, "checked_us": now_us}
    statement = upsert(connection, version_bases).values(version_id=version_id, base_id=base_id, **values)
    connection.execute(statement.on_conflict_do_update(index_elements=["version_id", "base_id"], set_=values))


def forget_verdicts(connection: Connection, version_id: str) -> None:
    connection.execute(delete(version_bases).where(version_bases.c.version_id == version_id))


def is_validated_for(base_id: str) -> ColumnElement[bool]:
    """Match versions that are valid for a base."""
    columns = version_bases.c
    return (
        select(columns.version_id)
        .where(columns.version_id == adapter_versions.c.id, columns.base_id == base_id, columns.state == "ready")
        .exists()
    )


def _decided(connection: Connection, base_id: str) -> Mapping[str, int]:
    columns = version_bases.c
    query = (
        select(columns.state, func.count().label("num_versions"))
        .join_from(version_bases, adapter_versions)
        .where(columns.base_id == base_id, adapter_versions.c.state == "ready")
        .group_by(columns.state)
    )
    return {row.state: row.num_versions for row in connection.execute(query)}


def _base(base_id: str, served_name: str, created_us: int, decided: Mapping[str, int], total: int) -> Base:
    num_validated, num_rejected = decided.get("ready", 0), decided.get("rejected", 0)
    return Base(
        id=base_id,
        served_name=served_name,
        created_us=created_us,
        num_validated=num_validated,
        num_rejected=num_rejected,
        num_pending=total - num_validated - num_rejected,
    )
