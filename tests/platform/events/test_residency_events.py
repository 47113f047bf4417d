from __future__ import annotations

from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.engine.protocol.messages import AdapterChange
from loramux.migrations.database import Database
from loramux.platform.accounts.tenants import Tenant, Tenants
from loramux.platform.events.event_log import EventFilter, EventLog
from loramux.platform.events.residency_events import ResidencyEvents
from tests.admin.rest.adapters.ready_versions import add_ready_versions

DIGEST = "1" * 64


def changes(*kinds: str, first: int = 10, digest: str = DIGEST) -> list[AdapterChange]:
    return [AdapterChange(number=first + place, digest=digest, kind=kind) for place, kind in enumerate(kinds)]


def test_changes_are_told_once_to_every_tenant_with_the_weights(clocked: Database, acme: Tenant) -> None:
    registry, globex = AdapterRegistry(clocked), Tenants(clocked).create("globex")
    for tenant in (acme, globex):
        add_ready_versions(clocked, registry.create_adapter(tenant.id, "support").id, 1)
    watch = ResidencyEvents(clocked, "srv_1")
    assert watch.report(changes("loaded", "struck", "evicted")) == 6
    # The engine repeats what it has not forgotten.
    assert watch.report(changes("loaded", "struck", "evicted", "loaded")) == 2
    assert watch.report(changes("loaded", digest="f" * 64, first=50)) == 0
    assert watch.question().changes_after == 50
    log = EventLog(clocked)
    log.advance()
    kinds = {"adapter.loaded", "adapter.evicted", "adapter.struck"}
    told = log.read(0, EventFilter(tenant_id=acme.id, types=kinds))
    assert [one.type.partition(".")[2] for one in told] == ["loaded", "struck", "evicted", "loaded"]
    assert {(one.model, one.data["version"], one.data["server"]) for one in told} == {("acme/support", 1, "srv_1")}
