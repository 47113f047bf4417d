"""Which adapters and versions exist, and which version a name means."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, Select, exists, insert, literal, select
from sqlalchemy.exc import IntegrityError

from loramux.adapter_store.errors import (
    AdapterExists,
    AdapterNotFound,
    InvalidName,
    TenantNotFound,
)
from loramux.adapter_store.records import DEFAULT_ALIAS, Adapter, AdapterRef, AdapterVersion
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.paging import Page, keyset_rows
from loramux.migrations.schema import adapter_alias_targets, adapter_grants, adapter_versions, adapters, tenants

SLUG = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
DIGEST_PREFIX = re.compile(r"[0-9a-f]{12,64}")
IDENTIFIER = re.compile(r"[a-z]{3}_[0-9a-f]{32}")
MAX_VERSION = 2**31 - 1
"""The largest version number that the database holds."""


class AdapterRegistry:
    """The SQL facts about adapters. Versions come into being through `Ingest`.

    `reserved_names` are names that no adapter may take: the served base model's.
    """

    def __init__(self, database: Database, reserved_names: Collection[str] = ()) -> None:
        self.database = database
        self._reserved_names = frozenset(reserved_names)

    def create_adapter(self, tenant_id: str, name: str) -> Adapter:
        """Raises InvalidName, TenantNotFound or AdapterExists."""
        check_slug(name, "name")
        if name in self._reserved_names:
            raise InvalidName("reserved_name", f"{name!r} is the name of the base model", "name")
        adapter_id = new_id("ada")
        if not is_identifier(tenant_id):
            raise TenantNotFound(f"no tenant {tenant_id!r}")
        try:
            with self.database.write() as connection:
                slug = connection.execute(select(tenants.c.slug).where(tenants.c.id == tenant_id)).scalar()
                if slug is None:
                    raise TenantNotFound(f"no tenant {tenant_id!r}")
                created_us = self.database.now_us(connection)
                connection.execute(
                    insert(adapters).values(id=adapter_id, tenant_id=tenant_id, name=name, created_us=created_us)
                )
        except IntegrityError:
            raise AdapterExists(f"the tenant already has an adapter {name!r}") from None
        return Adapter(adapter_id, tenant_id, slug, name, created_us, None)

    def get_adapter(self, adapter_id: str) -> Adapter | None:
        if not is_identifier(adapter_id):
            return None
        with self.database.read() as connection:
            row = connection.execute(_select_adapters().where(adapters.c.id == adapter_id)).first()
        return _adapter(row) if row else None

    def find_adapter(self, tenant_id: str, name: str) -> Adapter | None:
        if not is_identifier(tenant_id) or not SLUG.fullmatch(name):
            return None
        query = _select_adapters().where(adapters.c.tenant_id == tenant_id, adapters.c.name == name)
        with self.database.read() as connection:
            row = connection.execute(query).first()
        return _adapter(row) if row else None

    def list_adapters(
        self, tenant_id: str | None, limit: int, after: str | None = None, before: str | None = None
    ) -> Page[Adapter]:
        """One tenant's adapters, or every tenant's; newest first."""
        query = _select_adapters()
        if tenant_id is not None:
            query = query.where(adapters.c.tenant_id == tenant_id)
        with self.database.read() as connection:
            rows, has_more = keyset_rows(connection, query, adapters.c.id, limit, after, before)
        return Page(tuple(_adapter(row) for row in rows), has_more)

    def list_versions(
        self, adapter_id: str, limit: int, after: str | None = None, before: str | None = None
    ) -> Page[AdapterVersion]:
        """An adapter's versions, newest first; `after` and `before` are version identifiers."""
        query = select_versions().where(adapter_versions.c.adapter_id == adapter_id)
        with self.database.read() as connection:
            rows, has_more = keyset_rows(connection, query, adapter_versions.c.id, limit, after, before)
        return Page(tuple(version_of(row) for row in rows), has_more)

    def get_version(self, adapter_id: str, number: int) -> AdapterVersion | None:
        if not is_identifier(adapter_id) or not 0 < number <= MAX_VERSION:
            return None
        query = select_versions().where(
            adapter_versions.c.adapter_id == adapter_id, adapter_versions.c.number == number
        )
        with self.database.read() as connection:
            row = connection.execute(query).first()
        return version_of(row) if row else None

    def resolve(
        self,
        tenant_slug: str,
        adapter_name: str,
        version: int | None = None,
        digest_prefix: str | None = None,
        alias: str | None = None,
        caller_id: str | None = None,
        sticky: str = "",
    ) -> AdapterRef | None:
        """The ready version that a name means: by number, by digest prefix, by alias, else by the default alias.

        A digest prefix has 12 to 64 hexadecimal digits; one that fits two different digests names nothing. Where an
        alias names several versions, equal `sticky` texts get the same one as long as the weights stay, and a version
        whose weight grows keeps the texts that it had. With `caller_id`, only what that tenant owns or was granted.
        """
        if not SLUG.fullmatch(tenant_slug) or not SLUG.fullmatch(adapter_name):
            return None
        weight: ColumnElement[int] = literal(1)
        query = _select_versions_in_service()
        if version is not None:
            if not 0 < version <= MAX_VERSION:
                return None
            query = query.where(adapter_versions.c.number == version)
        elif digest_prefix is not None:
            if not DIGEST_PREFIX.fullmatch(digest_prefix):
                return None
            query = query.where(adapter_versions.c.digest.startswith(digest_prefix)).order_by(
                adapter_versions.c.number.desc()
            )
        else:
            wanted = DEFAULT_ALIAS if alias is None else alias
            if not SLUG.fullmatch(wanted):
                return None
            query, weight = _join_alias(query, wanted), adapter_alias_targets.c.weight
        query = query.add_columns(weight).where(tenants.c.slug == tenant_slug, adapters.c.name == adapter_name)
        if caller_id is not None:
            query = query.where(_may_call(caller_id))
        with self.database.read() as connection:
            found = [(AdapterRef(*row[:-1]), row[-1]) for row in connection.execute(query)]
        if not found:
            return None
        if version is None and digest_prefix is None:
            return _draw(found, f"{found[0][0].adapter_id}:{wanted}:{sticky}")
        first = found[0][0]
        return None if any(ref.digest != first.digest for ref, _ in found) else first

    def list_models(self, tenant_id: str) -> list[AdapterRef]:
        """The heaviest version behind the bare name of each adapter that a tenant may call, its own first, by name."""
        weight = adapter_alias_targets.c.weight
        query = _join_alias(_select_versions_in_service(), DEFAULT_ALIAS).where(_may_call(tenant_id))
        query = query.order_by(
            tenants.c.id != tenant_id, tenants.c.slug, adapters.c.name, weight, adapter_versions.c.number
        )
        with self.database.read() as connection:
            # Of an adapter's several versions the last one, which is the heaviest, stays.
            refs = {row.adapter_id: AdapterRef(*row) for row in connection.execute(query)}
        return list(refs.values())


def is_identifier(text: str) -> bool:
    """Whether text has the form of an identifier; other text need not, and must not, reach a query."""
    return IDENTIFIER.fullmatch(text) is not None


def check_slug(text: str, param: str) -> None:
    if not SLUG.fullmatch(text):
        raise InvalidName(
            "invalid_name",
            "a name has 1 to 63 of the characters a-z, 0-9, '.', '_' and '-' and begins with a letter or digit",
            param,
        )


def lock_adapter(connection: Connection, adapter_id: str) -> None:
    """Hold an adapter's row until the transaction ends: its versions and aliases change one at a time."""
    found = None
    if is_identifier(adapter_id):
        query = select(adapters.c.id).where(adapters.c.id == adapter_id).with_for_update()
        found = connection.execute(query).scalar()
    if found is None:
        raise AdapterNotFound(f"no adapter {adapter_id!r}")


def select_versions() -> Select[*tuple[Any, ...]]:
    """The columns that `version_of` reads."""
    columns = adapter_versions.c
    return select(
        columns.id,
        columns.adapter_id,
        columns.number,
        columns.state,
        columns.digest,
        columns.max_rank,
        columns.num_pages,
        columns.canonical_bytes,
        columns.report,
        columns.created_us,
        columns.ready_us,
    )


def version_of(row: Row[*tuple[Any, ...]]) -> AdapterVersion:
    return AdapterVersion(*row)


def _select_adapters() -> Select[*tuple[Any, ...]]:
    columns = adapters.c
    return select(
        columns.id, columns.tenant_id, tenants.c.slug, columns.name, columns.created_us, columns.disabled_us
    ).join(tenants, tenants.c.id == columns.tenant_id)


def _adapter(row: Row[*tuple[Any, ...]]) -> Adapter:
    return Adapter(*row)


def _select_versions_in_service() -> Select[*tuple[Any, ...]]:
    """The columns of an AdapterRef, of versions that may be served."""
    return (
        select(
            tenants.c.id,
            tenants.c.slug,
            adapters.c.id.label("adapter_id"),
            adapters.c.name,
            adapter_versions.c.id,
            adapter_versions.c.number,
            adapter_versions.c.digest,
            adapter_versions.c.max_rank,
        )
        .select_from(adapter_versions)
        .join(adapters, adapters.c.id == adapter_versions.c.adapter_id)
        .join(tenants, tenants.c.id == adapters.c.tenant_id)
        .where(adapter_versions.c.state == "ready", adapters.c.disabled_us.is_(None))
    )


def _join_alias(query: Select[*tuple[Any, ...]], alias: str) -> Select[*tuple[Any, ...]]:
    targets = adapter_alias_targets.c
    return query.join(
        adapter_alias_targets, (targets.adapter_id == adapters.c.id) & (targets.version_id == adapter_versions.c.id)
    ).where(targets.name == alias)


def _may_call(tenant_id: str) -> ColumnElement[bool]:
    grants = adapter_grants.c
    granted = exists().where(grants.adapter_id == adapters.c.id, grants.tenant_id == tenant_id)
    return (adapters.c.tenant_id == tenant_id) | granted


def _draw(targets: Sequence[tuple[AdapterRef, int]], sticky: str) -> AdapterRef:
    """One of the targets, in proportion to their weights, by a hash of `sticky` alone.

    The newest version has the end of the range, so that one whose share grows takes over more and gives back none.
    """
    ordered = sorted(targets, key=lambda target: target[0].version)
    position = int.from_bytes(hashlib.sha256(sticky.encode("utf-8", "surrogatepass")).digest()[:8]) / 2**64
    total = sum(weight for _, weight in ordered)
    reached = 0
    for ref, weight in ordered:
        reached += weight
        if position * total < reached:
            return ref
    return ordered[-1][0]
