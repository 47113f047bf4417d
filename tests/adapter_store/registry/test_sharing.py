from __future__ import annotations

from collections.abc import Callable

import pytest

from loramux.adapter_store.errors import GrantNotFound, InvalidGrant, TenantNotFound
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.sharing import AdapterGrants
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from tests.adapter_store.registry.bare_versions import Versions


def test_shared_adapter_is_called_by_its_full_name(
    database: Database, registry: AdapterRegistry, versions: Versions, make_tenant: Callable[[str], str]
) -> None:
    acme, globex, initech = make_tenant("acme"), make_tenant("globex"), make_tenant("initech")
    grants = AdapterGrants(database)
    shared, own = registry.create_adapter(acme, "support"), registry.create_adapter(globex, "zebra")
    versions.add(shared.id, "a")
    versions.add(own.id, "b")

    def may_call(caller: str) -> bool:
        found = [
            registry.resolve("acme", "support", caller_id=caller, **which)  # type: ignore[arg-type]
            for which in ({}, {"version": 1}, {"digest_prefix": "a" * 12}, {"alias": "default"})
        ]
        assert len({ref is None for ref in found}) == 1
        return found[0] is not None

    assert [may_call(tenant) for tenant in (acme, globex, initech)] == [True, False, False]
    grant = grants.add(shared, globex)
    assert grants.add(shared, globex) == grant, "repeating it changes nothing"
    assert (grant.tenant_id, grant.tenant_slug, grant.adapter_id) == (globex, "globex", shared.id)
    assert grants.list(shared.id) == [grant]
    assert [may_call(tenant) for tenant in (acme, globex, initech)] == [True, True, False]
    listed = [f"{ref.tenant_slug}/{ref.adapter_name}" for ref in registry.list_models(globex)]
    assert listed == ["globex/zebra", "acme/support"], "its own models come first"
    grants.remove(shared.id, globex)
    assert not may_call(globex)
    assert grants.list(shared.id) == []
    with pytest.raises(GrantNotFound):
        grants.remove(shared.id, globex)


def test_grant_requires_another_existing_tenant(
    database: Database, registry: AdapterRegistry, make_tenant: Callable[[str], str]
) -> None:
    acme = make_tenant("acme")
    adapter = registry.create_adapter(acme, "support")
    with pytest.raises(InvalidGrant):
        AdapterGrants(database).add(adapter, acme)
    for unknown in (new_id("ten"), "no identifier", "\0"):
        with pytest.raises(TenantNotFound):
            AdapterGrants(database).add(adapter, unknown)
