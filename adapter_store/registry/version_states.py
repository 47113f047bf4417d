"""Takes versions and whole adapters out of service and restores them. Requests in progress finish normally."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import exists, select, update

from loramux.adapter_store.errors import VersionInUse, VersionNotReady
from loramux.adapter_store.registry.records import Adapter, AdapterVersion, VersionState
from loramux.adapter_store.registry.registry import AdapterRegistry, lock_adapter, owner_of
from loramux.migrations.audit import audit
from loramux.migrations.database import Database
from loramux.migrations.schema import adapter_alias_targets, adapter_versions, adapters

_ACTIONS = {"archived": "version.archive", "quarantined": "version.quarantine", "ready": "version.restore"}


class VersionStates:
    """Changes the states of versions and adapters. No data is deleted.

    An archived version answers no request until it is restored. Only an operator can restore a quarantined version.
    Disabling an adapter takes all its versions out of service without changing their states.
    """

    def __init__(self, database: Database, registry: AdapterRegistry) -> None:
        self._database = database
        self._registry = registry

    def archive(self, adapter_id: str, number: int) -> AdapterVersion:
        """Take a ready version out of service. Raises VersionInUse if an alias names the version.

        Also raises AdapterNotFound, VersionNotFound or VersionNotReady.
        """
        return self._change(adapter_id, number, ("ready", "archived"), "archived", may_be_named=False)

    def quarantine(self, adapter_id: str, number: int) -> AdapterVersion:
        """Take a version out of service immediately, even if aliases name it.

        Those aliases then serve their other versions, if any. Raises AdapterNotFound, VersionNotFound or
        VersionNotReady.
        """
        return self._change(adapter_id, number, ("ready", "archived", "quarantined"), "quarantined", may_be_named=True)

    def restore(self, adapter_id: str, number: int, from_states: Collection[VersionState]) -> AdapterVersion:
        """Put a version back into service.

        Raises AdapterNotFound, VersionNotFound, or VersionNotReady if its state is neither `ready` nor in
        `from_states`.
        """
        return self._change(adapter_id, number, (*from_states, "ready"), "ready", may_be_named=True)

    def set_disabled(self, adapter_id: str, is_disabled: bool) -> Adapter:
        with self._database.write() as connection:
            lock_adapter(connection, adapter_id)
            now_us = self._database.now_us(connection)
            change = update(adapters).where(adapters.c.id == adapter_id)
            if is_disabled:
                # If the adapter is already disabled, keep the original time.
                change = change.where(adapters.c.disabled_us.is_(None))
            was_disabled = select(adapters.c.disabled_us.is_not(None)).where(adapters.c.id == adapter_id)
            before = {"is_disabled": bool(connection.execute(was_disabled).scalar())}
            connection.execute(change.values(disabled_us=now_us if is_disabled else None))
            action = "adapter.disable" if is_disabled else "adapter.enable"
            changed = {"before": before, "after": {"is_disabled": is_disabled}}
            audit(connection, now_us, action, adapter_id, tenant_id=owner_of(adapter_id), **changed)
        adapter = self._registry.get_adapter(adapter_id)
        assert adapter is not None
        return adapter

    def unserved_digests(self, adapter_id: str, number: int | None = None) -> list[str]:
        """Return the digests of an adapter's versions, except digests that a version in service has.

        With `number`, only that version is considered.
        """
        own, other = adapter_versions.c, adapter_versions.alias()
        is_served = (
            exists()
            .select_from(other)
            .where(
                other.c.digest == own.digest,
                other.c.state == "ready",
                adapters.c.id == other.c.adapter_id,
                adapters.c.disabled_us.is_(None),
            )
        )
        query = select(own.digest).where(own.adapter_id == adapter_id, own.digest.is_not(None), ~is_served).distinct()
        if number is not None:
            query = query.where(own.number == number)
        with self._database.read() as connection:
            return [row.digest for row in connection.execute(query.order_by(own.digest))]

    def _change(
        self, adapter_id: str, number: int, wanted: Collection[str], state: VersionState, *, may_be_named: bool
    ) -> AdapterVersion:
        version = self._registry.find_version(adapter_id, number)
        with self._database.write() as connection:
            lock_adapter(connection, adapter_id)
            if not may_be_named:
                targets = adapter_alias_targets.c
                named = select(targets.name).where(targets.version_id == version.id).order_by(targets.name).limit(1)
                alias = connection.execute(named).scalar()
                if alias is not None:
                    raise VersionInUse(f"the alias {alias!r} names version {number}: move it first")
            changed = connection.execute(
                update(adapter_versions)
                .where(adapter_versions.c.id == version.id, adapter_versions.c.state.in_(wanted))
                .values(state=state)
            )
            if changed.rowcount == 0:
                raise VersionNotReady(f"version {number} is {version.state}, which cannot become {state}")
            now_us, target = self._database.now_us(connection), f"{adapter_id}@{number}"
            states = {"before": {"state": version.state}, "after": {"state": state}}
            audit(connection, now_us, _ACTIONS[state], target, tenant_id=owner_of(adapter_id), **states)
        found = self._registry.get_version(adapter_id, number)
        assert found is not None
        return found
