"""Versions pinned in the page pool, stored so that the pins survive engine restarts."""

from __future__ import annotations

from sqlalchemy import select, update

from loramux.adapter_store.errors import VersionNotReady
from loramux.adapter_store.registry.bases import is_validated_for
from loramux.adapter_store.registry.records import AdapterVersion
from loramux.adapter_store.registry.registry import AdapterRegistry, lock_adapter, owner_of
from loramux.migrations.audit import audit
from loramux.migrations.database import Database
from loramux.migrations.schema import adapter_versions, adapters


class AdapterPins:
    """Stores the pins, which each engine receives when it starts. Blocking."""

    def __init__(self, database: Database, registry: AdapterRegistry) -> None:
        self._database = database
        self._registry = registry

    def set_pinned(self, adapter_id: str, number: int, is_pinned: bool) -> AdapterVersion:
        """Pin or unpin a version.

        Raises AdapterNotFound, VersionNotFound, or VersionNotReady if the version cannot be pinned because it is not
        ready.
        """
        columns = adapter_versions.c
        with self._database.write() as connection:
            lock_adapter(connection, adapter_id)
            now_us = self._database.now_us(connection)
            change = update(adapter_versions).where(columns.adapter_id == adapter_id, columns.number == number)
            if is_pinned:
                change = change.where(columns.state == "ready", columns.pinned_us.is_(None)).values(pinned_us=now_us)
            else:
                change = change.where(columns.pinned_us.is_not(None)).values(pinned_us=None)
            if connection.execute(change).rowcount:
                changed = {"before": {"is_pinned": not is_pinned}, "after": {"is_pinned": is_pinned}}
                action, target = "version.pin" if is_pinned else "version.unpin", f"{adapter_id}@{number}"
                audit(connection, now_us, action, target, tenant_id=owner_of(adapter_id), **changed)
        version = self._registry.find_version(adapter_id, number)
        if is_pinned and version.pinned_us is None:
            raise VersionNotReady(f"version {number} is {version.state}: only a ready version can be pinned")
        return version

    def digests(self) -> frozenset[str]:
        """Return the digests of all pinned versions that are in service and valid for the served base."""
        columns = adapter_versions.c
        query = (
            select(columns.digest)
            .join_from(adapter_versions, adapters)
            .where(columns.pinned_us.is_not(None), columns.state == "ready", adapters.c.disabled_us.is_(None))
        )
        if self._registry.base_id is not None:
            query = query.where(is_validated_for(self._registry.base_id))
        with self._database.read() as connection:
            return frozenset(connection.execute(query).scalars())
