"""The bases that servers on one database serve, and the verdicts on each version for each base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, delete, func, select

from loramux.adapter_store.errors import BaseInUse, BaseNotFound
from loramux.adapter_store.registry.base_servers import SILENT_S, BaseServer, lock_bases, register_base, servers_by_base
from loramux.adapter_store.registry.base_shares import set_shares
from loramux.adapter_store.registry.records import BaseVerdict
from loramux.migrations.audit import audit
from loramux.migrations.claims import NO_CLAIM
from loramux.migrations.database import LONGEST_READ_S, Database
from loramux.migrations.paging import Page, keyset_page
from loramux.migrations.schema import adapter_versions, adapters, base_servers, bases, replicas, tenants, version_bases
from loramux.migrations.upserts import upsert

NO_SUCH_BASE = "there is no such base"


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """A base that a server has served, with the numbers of ready versions by their verdict for this base."""

    id: str
    served_name: str
    created_us: int
    num_validated: int
    num_rejected: int
    num_pending: int
    servers: Sequence[BaseServer]
    weight: int | None
    """Its relative share of the requests, or None if requests are not divided between this base and others."""
    is_shared: bool
    """Whether a server of the base shares requests with other servers."""


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
    """Registers and forgets bases, and reports on their versions. Blocking."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def register(self, base_id: str, served_name: str, prompt_sha256: str | None = None) -> None:
        """Record a base. Call this before one of its servers starts to validate versions.

        `prompt_sha256` is the same for bases with the same tokenizer and chat templates.
        """
        with self._database.write() as connection:
            register_base(self._database, connection, base_id, served_name, prompt_sha256)

    def list(self) -> Sequence[Base]:
        """List all bases, oldest first."""
        return self._read(select(bases).order_by(bases.c.created_us, bases.c.id))

    def get(self, base_id: str) -> Base:
        """Return one base. Raises BaseNotFound."""
        found = self._read(select(bases).where(bases.c.id == base_id))
        if not found:
            raise BaseNotFound(NO_SUCH_BASE)
        return found[0]

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
            return keyset_page(connection, query, columns.version_id, _rejected, limit, after, before)

    def revalidate(self, base_id: str) -> int:
        """Delete the verdicts on ready versions that were rejected for a base, so that its servers validate them again.

        Returns the number of these versions. Raises BaseNotFound.
        """
        columns = version_bases.c
        is_ready = select(adapter_versions.c.id).where(
            adapter_versions.c.id == columns.version_id, adapter_versions.c.state == "ready"
        )
        rejected = delete(version_bases).where(
            columns.base_id == base_id, columns.state == "rejected", is_ready.exists()
        )
        with self._database.write() as connection:
            _lock(connection, base_id)
            num_versions = connection.execute(rejected).rowcount
            if num_versions:
                now_us = self._database.now_us(connection)
                after = {"num_versions": num_versions}
                audit(connection, now_us, "base.revalidate", base_id, tenant_id=None, after=after)
        return num_versions

    def set_weights(self, weights: Mapping[str, int]) -> None:
        """Divide requests between bases: see `set_shares`."""
        set_shares(self._database, weights)

    def forget(self, base_id: str) -> None:
        """Delete a base with its verdicts. Raises BaseNotFound, or BaseInUse while a server serves the base."""
        with self._database.write() as connection:
            # A server that reports at the same time waits, and then registers the base again.
            lock_bases(self._database, connection)
            served_name = _lock(connection, base_id)
            now_us = self._database.now_us(connection)
            running = [one for one in servers_by_base(connection, now_us).get(base_id, ()) if one.state != "silent"]
            if running:
                raise BaseInUse(
                    f"{running[0].address} serves the base: stop its servers first. A server that has crashed counts "
                    f"for {SILENT_S:.0f} seconds"
                )
            audit(connection, now_us, "base.forget", base_id, tenant_id=None, before={"served_name": served_name})
            connection.execute(delete(version_bases).where(version_bases.c.base_id == base_id))
            connection.execute(delete(base_servers).where(base_servers.c.base_id == base_id))
            connection.execute(delete(bases).where(bases.c.id == base_id))

    def verdict(self, version_id: str, base_id: str) -> BaseVerdict:
        columns = version_bases.c
        query = select(columns.state).where(columns.version_id == version_id, columns.base_id == base_id)
        with self._database.read() as connection:
            state = connection.execute(query).scalar()
        return state if state in ("ready", "rejected") else "pending"

    def _read(self, query: Select[Any]) -> Sequence[Base]:
        num_ready = select(func.count()).select_from(adapter_versions).where(adapter_versions.c.state == "ready")
        with self._database.read(LONGEST_READ_S) as connection:
            rows = connection.execute(query).all()
            total = connection.execute(num_ready).scalar_one()
            servers = servers_by_base(connection, self._database.now_us(connection))
            shared = set(connection.execute(select(replicas.c.base_id)).scalars())
            return [
                _base(row, _decided(connection, row.id), total, servers.get(row.id, ()), row.id in shared)
                for row in rows
            ]


def _lock(connection: Connection, base_id: str) -> str:
    """Lock the base's row and return the base's served name. Raises BaseNotFound."""
    query = select(bases.c.served_name).where(bases.c.id == base_id).with_for_update()
    served_name: str | None = connection.execute(query).scalar()
    if served_name is None:
        raise BaseNotFound(NO_SUCH_BASE)
    return served_name


def note_validated(connection: Connection, version_id: str, base_id: str, now_us: int) -> None:
    """Record that a version is valid for a base."""
    verdict = {"state": "ready", **NO_CLAIM, "code": None, "message": None}
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


def _rejected(row: Row[Any]) -> RejectedVersion:
    return RejectedVersion(**row._mapping)


def _base(
    row: Row[Any], decided: Mapping[str, int], total: int, servers: Sequence[BaseServer], is_shared: bool
) -> Base:
    num_validated, num_rejected = decided.get("ready", 0), decided.get("rejected", 0)
    return Base(
        id=row.id,
        served_name=row.served_name,
        created_us=row.created_us,
        num_validated=num_validated,
        num_rejected=num_rejected,
        num_pending=total - num_validated - num_rejected,
        servers=servers,
        weight=row.weight,
        is_shared=is_shared,
    )
