from __future__ import annotations

from typing import Any

from sqlalchemy import func, select

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.accounts.tenants import Tenant, TenantChanges, Tenants
from loramux.platform.stored_responses.response_store import ResponseStore, StoredResponse
from loramux.platform.stored_responses.sealing import Sealing
from tests.platform.clocked_databases import FakeClock

KEY = b"a key of at least 32 characters."


def stored(tenant: Tenant, response_id: str = "resp_1") -> StoredResponse:
    items: list[dict[str, Any]] = [{"id": "msg_1", "content": "é"}]
    return StoredResponse(
        id=response_id, tenant_id=tenant.id, adapter_id="ada_1", input=items, response={"id": response_id}
    )


def test_response_is_kept_for_its_days(clocked: Database, clock: FakeClock, acme: Tenant) -> None:
    store = ResponseStore(clocked, Sealing(KEY))
    assert store.put(stored(acme), 2)
    clock.advance(2 * 86400 - 1)
    assert store.get(acme.id, "resp_1") == stored(acme)
    clock.advance(1)
    assert store.get(acme.id, "resp_1") is None


def test_response_of_another_tenant_is_neither_read_nor_deleted(clocked: Database, acme: Tenant) -> None:
    store, other = ResponseStore(clocked, Sealing(KEY)), Tenants(clocked).create("other")
    store.put(stored(acme), 1)
    assert store.get(other.id, "resp_1") is None
    store.delete(other.id, "resp_1")
    assert store.get(acme.id, "resp_1") == stored(acme)
    store.delete(acme.id, "resp_1")
    assert store.get(acme.id, "resp_1") is None


def test_responses_are_purged_with_their_tenant(clocked: Database, acme: Tenant) -> None:
    store, tenants = ResponseStore(clocked, Sealing(KEY)), Tenants(clocked)
    kept, lost = tenants.create("kept"), tenants.create("lost")
    for tenant in (acme, kept, lost):
        store.put(stored(tenant, f"resp_{tenant.slug}"), 1)
    tenants.update(acme.id, TenantChanges(state="suspended"), lambda tenant: None)
    tenants.purge(acme.id)
    assert tenants.delete(lost.id)
    assert store.get(kept.id, "resp_kept") is not None
    with clocked.read() as connection:
        assert connection.execute(select(func.count()).select_from(schema.responses)).scalar_one() == 1
