"""Adapters and versions in SQL, and the resolution of model names to versions."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Protocol

from sqlalchemy import Connection, Row, ScalarSelect, Select, delete, insert, select
from sqlalchemy.exc import IntegrityError

from loramux.adapter_store.errors import (
    AdapterExists,
    AdapterInUse,
    AdapterNotFound,
    InvalidName,
    TenantNotFound,
    VersionNotFound,
)
from loramux.adapter_store.registry.bases import Bases
from loramux.adapter_store.registry.records import DEFAULT_ALIAS, Adapter, AdapterRef, AdapterVersion, BaseVerdict
from loramux.adapter_store.registry.resolution import (
    VALID_BASES,
    Suffix,
    adapter_ref,
    callable_versions,
    default_models,
    draw,
    version_digest_of,
    versions_named,
)
from loramux.migrations.audit import audit
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.paging import Page, keyset_page
from loramux.migrations.schema import (
    adapter_alias_history,
    adapter_aliases,
    adapter_grants,
    adapter_versions,
    adapters,
    quota_counters,
    quota_policies,
    tenants,
    uploads,
)

SLUG = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
DIGEST_PREFIX = re.compile(r"[0-9a-f]{12,64}")
IDENTIFIER = re.compile(r"[a-z]{3}_[0-9a-f]{32}")
MAX_VERSION = 2**31 - 1
"""The largest version number that the database can store."""


class StockLimits(Protocol):
    """Decides, in the transaction that adds adapters or bytes, whether the tenant may store more."""

    @property
    def refusal(self) -> type[Exception]:
        """The error that `admit` raises."""

    def admit(self, connection: Connection, tenant_id: str, metric: str, amount: int, now_us: int) -> None:
        """Raise `refusal` if `amount` more `adapters` or `adapter_bytes` would exceed the limit."""


class AdapterRegistry:
    """Adapters and versions in SQL. `Ingest` creates new versions.

    Adapters cannot have any of the `reserved_names`, such as the served base model's name. `base_id` is the base whose
    verdict is looked up for each resolved version. If it is None, every version counts as valid.
    """

    def __init__(
        self,
        database: Database,
        reserved_names: Collection[str] = (),
        limits: StockLimits | None = None,
        base_id: str | None = None,
    ) -> None:
        self.database = database
        self.limits = limits
        self.base_id = base_id
        self._reserved_names = frozenset(reserved_names)

    def create_adapter(self, tenant_id: str, name: str) -> Adapter:
        """Create an adapter. Raises InvalidName, TenantNotFound, AdapterExists, or the limits' `refusal`."""
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
                if self.limits is not None:
                    self.limits.admit(connection, tenant_id, "adapters", 1, created_us)
                connection.execute(
                    insert(adapters).values(id=adapter_id, tenant_id=tenant_id, name=name, created_us=created_us)
                )
                audit(connection, created_us, "adapter.create", adapter_id, tenant_id=tenant_id, after={"name": name})
        except IntegrityError:
            raise AdapterExists(f"the tenant already has an adapter {name!r}") from None
        return Adapter(adapter_id, tenant_id, slug, name, created_us, None)

    def get_adapter(self, adapter_id: str) -> Adapter | None:
        if not is_identifier(adapter_id):
            return None
        with self.database.read() as connection:
            row = connection.execute(_select_adapters().where(adapters.c.id == adapter_id)).first()
        return _adapter(row) if row else None

    def delete_adapter(self, adapter_id: str) -> None:
        """Delete an adapter. Raises AdapterNotFound, or AdapterInUse if the adapter has versions or uploads."""
        with self.database.write() as connection:
            lock_adapter(connection, adapter_id)
            version = select(adapter_versions.c.id).where(adapter_versions.c.adapter_id == adapter_id).limit(1)
            upload = select(uploads.c.id).where(uploads.c.adapter_id == adapter_id).limit(1)
            if connection.execute(version).first() or connection.execute(upload).first():
                raise AdapterInUse("the adapter has versions or uploads: disable it instead")
            found = connection.execute(select(adapters.c.name, adapters.c.tenant_id).where(adapters.c.id == adapter_id))
            row = found.one()
            now_us = self.database.now_us(connection)
            before = {"name": row.name}
            audit(connection, now_us, "adapter.delete", adapter_id, tenant_id=row.tenant_id, before=before)
            delete_adapter_rows(connection, adapter_id)

    def find_adapter(self, tenant_id: str, name: str) -> Adapter | None:
        if not is_identifier(tenant_id) or not SLUG.fullmatch(name):
            return None
        query = _select_adapters().where(adapters.c.tenant_id == tenant_id, adapters.c.name == name)
        with self.database.read() as connection:
            row = connection.execute(query).first()
        return _adapter(row) if row else None

    def list_adapters(
        self,
        tenant_id: str | None,
        limit: int,
        after: str | None = None,
        before: str | None = None,
        only: Collection[str] | None = None,
    ) -> Page[Adapter]:
        """List one tenant's adapters, or all adapters, newest first. `only` limits the list to these identifiers."""
        query = _select_adapters()
        if tenant_id is not None:
            query = query.where(adapters.c.tenant_id == tenant_id)
        if only is not None:
            query = query.where(adapters.c.id.in_(only))
        with self.database.read() as connection:
            return keyset_page(connection, query, adapters.c.id, _adapter, limit, after, before)

    def list_versions(
        self, adapter_id: str, limit: int, after: str | None = None, before: str | None = None
    ) -> Page[AdapterVersion]:
        """List an adapter's versions, newest first. `after` and `before` are version identifiers."""
        query = select_versions().where(adapter_versions.c.adapter_id == adapter_id)
        with self.database.read() as connection:
            return keyset_page(connection, query, adapter_versions.c.id, version_of, limit, after, before)

    def get_version(self, adapter_id: str, number: int) -> AdapterVersion | None:
        if not is_identifier(adapter_id) or not 0 < number <= MAX_VERSION:
            return None
        query = select_versions().where(
            adapter_versions.c.adapter_id == adapter_id, adapter_versions.c.number == number
        )
        with self.database.read() as connection:
            row = connection.execute(query).first()
        return version_of(row) if row else None

    def find_version(self, adapter_id: str, number: int) -> AdapterVersion:
        """Like `get_version`, but raises VersionNotFound."""
        version = self.get_version(adapter_id, number)
        if version is None:
            raise VersionNotFound(f"the adapter has no version {number}")
        return version

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
        """Resolve a name to a ready version: by number, digest prefix or alias, otherwise by the default alias.

        A digest prefix has 12 to 64 hexadecimal digits. A prefix that matches two different digests resolves to
        nothing. If an alias names several versions, equal `sticky` strings resolve to the same version while the
        weights are unchanged. Strings that resolve to the newest version still do so when its share grows. With
        `caller_id`, only adapters that this tenant owns or was granted are considered. The caller must check that the
        version's `base_verdict` is ready.
        """
        if not SLUG.fullmatch(tenant_slug) or not SLUG.fullmatch(adapter_name):
            return None
        suffix: Suffix
        wanted: int | str
        if version is not None:
            suffix, wanted, is_name = "number", version, 0 < version <= MAX_VERSION
        elif digest_prefix is not None:
            suffix, wanted, is_name = "digest", digest_prefix, bool(DIGEST_PREFIX.fullmatch(digest_prefix))
        else:
            suffix, wanted = "alias", DEFAULT_ALIAS if alias is None else alias
            is_name = bool(SLUG.fullmatch(wanted))
        if not is_name:
            return None
        parameters: dict[str, object] = {"tenant": tenant_slug, "adapter": adapter_name, "wanted": wanted}
        if suffix == "digest":
            # "g" sorts after every hexadecimal digit, in any collation.
            parameters["end"] = f"{wanted}g"
        if caller_id is not None:
            parameters["caller_id"] = caller_id
        query = versions_named(suffix, caller_id is not None, self.base_id is not None)
        rows = self.database.query(query, parameters | self._base)
        found = [(adapter_ref(row), row[-1]) for row in rows]
        if not found:
            return None
        newest = found[0][0]
        if suffix == "alias":
            drawn = draw(found, f"{newest.adapter_id}:{wanted}:{sticky}")
            num_own = rows[0].share_base_cache
            # Most aliases do not have the option, and every request resolves a name.
            return drawn if num_own is None else replace(drawn, share_base_cache=num_own)
        return None if any(ref.version_digest != newest.version_digest for ref, _ in found) else newest

    def list_models(self, tenant_id: str, bases: Sequence[str] = ()) -> list[AdapterRef]:
        """List the adapters that a tenant may call, its own first.

        Each adapter comes with the version that has the largest weight in its default alias. Versions that are valid
        for none of the `bases`, by default the served base, are left out.
        """
        parameters: dict[str, object] = {"caller_id": tenant_id, "wanted": DEFAULT_ALIAS}
        rows = self.database.query(default_models(self.base_id is not None), parameters | self._bases(bases))
        # Each adapter's rows are sorted by ascending weight, so the version with the largest weight overwrites the
        # others.
        return list({row.adapter_id: adapter_ref(row) for row in rows}.values())

    def list_callable(self, tenant_id: str, limit: int) -> list[AdapterRef]:
        """List the versions in service that a tenant may call, its own adapters first, at most `limit`.

        Versions that are not valid for the served base are left out.
        """
        query = callable_versions(self.base_id is not None).limit(limit)
        rows = self.database.query(query, {"caller_id": tenant_id} | self._bases())
        return [adapter_ref(row) for row in rows]

    def base_verdict(self, version_id: str) -> BaseVerdict:
        """Return the verdict on a version for the served base."""
        return "ready" if self.base_id is None else Bases(self.database).verdict(version_id, self.base_id)

    def bases_of(self, version_id: str) -> frozenset[str]:
        """Return the bases that a version is valid for."""
        return frozenset(row.base_id for row in self.database.query(VALID_BASES, {"version_id": version_id}))

    def _bases(self, bases: Sequence[str] = ()) -> dict[str, object]:
        return {} if self.base_id is None else {"bases": bases or (self.base_id,)}

    @property
    def _base(self) -> dict[str, object]:
        return {} if self.base_id is None else {"base_id": self.base_id}


def is_identifier(text: str) -> bool:
    """Return whether the text has the form of an identifier. Other text must never reach a query."""
    return IDENTIFIER.fullmatch(text) is not None


def check_slug(text: str, param: str) -> None:
    if not SLUG.fullmatch(text):
        raise InvalidName(
            "invalid_name",
            "a name must have 1 to 63 of the characters a-z, 0-9, '.', '_' and '-', and begin with a letter or digit",
            param,
        )


def owner_of(adapter_id: str) -> ScalarSelect[str]:
    """Return a subquery for the tenant that owns an adapter."""
    return select(adapters.c.tenant_id).where(adapters.c.id == adapter_id).scalar_subquery()


def lock_adapter(connection: Connection, adapter_id: str) -> None:
    """Lock an adapter's row until the transaction ends, so that its versions and aliases change one at a time.

    Raises AdapterNotFound.
    """
    found = None
    if is_identifier(adapter_id):
        query = select(adapters.c.id).where(adapters.c.id == adapter_id).with_for_update()
        found = connection.execute(query).scalar()
    if found is None:
        raise AdapterNotFound(f"no adapter {adapter_id!r}")


def delete_adapter_rows(connection: Connection, adapter_id: str) -> None:
    """Delete an adapter without versions or uploads, with its aliases, its grants and the quotas on it."""
    policies = select(quota_policies.c.id).where(quota_policies.c.subject_id == adapter_id)
    connection.execute(delete(quota_counters).where(quota_counters.c.policy_id.in_(policies)))
    connection.execute(delete(quota_policies).where(quota_policies.c.subject_id == adapter_id))
    for table in (adapter_alias_history, adapter_aliases, adapter_grants):
        connection.execute(delete(table).where(table.c.adapter_id == adapter_id))
    connection.execute(delete(adapters).where(adapters.c.id == adapter_id))


def lock_tenant(connection: Connection, tenant_id: str) -> None:
    """Lock a tenant's row until the transaction ends, so that the tenant's uploads are checked and added one at a time.

    A transaction that also locks an adapter's row must lock that row first.
    """
    # FOR NO KEY UPDATE does not block inserts of rows that reference the tenant, so the tenant's requests continue.
    query = select(tenants.c.id).where(tenants.c.id == tenant_id).with_for_update(key_share=True)
    connection.execute(query).scalar_one()


def select_versions() -> Select[*tuple[Any, ...]]:
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
        columns.pinned_us,
        version_digest_of(columns),
        columns.invocation_tokens,
        columns.task,
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
