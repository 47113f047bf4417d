from __future__ import annotations

import random
from typing import Any

from sqlalchemy import func, select

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.accounts.tenants import Tenant, TenantChanges, Tenants
from loramux.platform.stored_responses.chat_store import ChatFilter, ChatStore, StoredChat
from loramux.platform.stored_responses.sealing import MAX_CONTENT_BYTES, Sealing
from tests.platform.clocked_databases import FakeClock
from tests.platform.stored_responses.test_response_store import KEY

MESSAGES = [{"id": "chatcmpl-1-0", "role": "user", "content": "é"}]


def stored(tenant: Tenant, number: int = 1, **metadata: str) -> StoredChat:
    completion = {"id": f"chatcmpl-{number}", "model": "support", "metadata": metadata}
    return StoredChat(id=f"chatcmpl-{number}", tenant_id=tenant.id, adapter_id="ada_1", completion=completion)


def ids(store: ChatStore, tenant: Tenant, **wanted: Any) -> list[str]:
    every: dict[str, Any] = {"model": None, "metadata": {}, "adapter_ids": None, "limit": 9, "after": None}
    page = store.page(tenant.id, ChatFilter(**{**every, "is_ascending": True, **wanted}))
    return [one.id for one in page.data]


def test_chat_is_kept_for_its_days(clocked: Database, clock: FakeClock, acme: Tenant) -> None:
    store = ChatStore(clocked, Sealing(KEY))
    assert store.put(stored(acme), MESSAGES, 2)
    clock.advance(2 * 86400 - 1)
    assert store.get(acme.id, "chatcmpl-1") == stored(acme)
    assert store.messages(acme.id, "chatcmpl-1") == MESSAGES
    clock.advance(1)
    assert store.get(acme.id, "chatcmpl-1") is None
    assert store.messages(acme.id, "chatcmpl-1") == ids(store, acme) == []


def test_chats_are_found_by_metadata_model_and_adapter(clocked: Database, acme: Tenant) -> None:
    store, other = ChatStore(clocked, Sealing(KEY)), Tenants(clocked).create("other")
    for number, metadata in enumerate(({"a": "b%"}, {"a": "bc", "x": "1"}, {"ab": "c", "x": "1"}, {}), 1):
        store.put(stored(acme, number, **metadata), MESSAGES, 1)
    store.put(stored(other, 5, a="b%"), MESSAGES, 1)
    assert ids(store, acme, metadata={"a": "b%"}) == ["chatcmpl-1"]
    assert ids(store, acme, metadata={"a": "bc"}) == ["chatcmpl-2"]
    assert ids(store, acme, metadata={"x": "1"}, is_ascending=False) == ["chatcmpl-3", "chatcmpl-2"]
    assert ids(store, acme, metadata={"x": "1"}, after="chatcmpl-2") == ["chatcmpl-3"]
    assert ids(store, acme, model="base") == ids(store, acme, adapter_ids=["ada_2"]) == []
    assert len(ids(store, acme, model="support", adapter_ids=["ada_1"])) == 4
    assert ids(store, other) == ["chatcmpl-5"]


def test_chat_is_replaced_unless_it_is_too_long_or_deleted(clocked: Database, acme: Tenant) -> None:
    store = ChatStore(clocked, Sealing(KEY))
    store.put(stored(acme), MESSAGES, 1)
    assert store.update(stored(acme, a="1"))
    assert store.get(acme.id, "chatcmpl-1") == stored(acme, a="1")
    # Random hexadecimal digits cannot be compressed to less than half.
    long = random.Random(0).randbytes(MAX_CONTENT_BYTES).hex()
    assert not store.update(stored(acme, a=long))
    assert not store.put(stored(acme, 2, a=long), MESSAGES, 1)
    store.delete(acme.id, "chatcmpl-1")
    assert not store.update(stored(acme, a="1"))


def test_chats_are_purged_with_their_tenant(clocked: Database, acme: Tenant) -> None:
    store, tenants = ChatStore(clocked, Sealing(KEY)), Tenants(clocked)
    kept, lost = tenants.create("kept"), tenants.create("lost")
    for number, tenant in enumerate((acme, kept, lost)):
        store.put(stored(tenant, number), MESSAGES, 1)
    tenants.update(acme.id, TenantChanges(state="suspended"), lambda tenant: None)
    tenants.purge(acme.id)
    assert tenants.delete(lost.id)
    with clocked.read() as connection:
        assert connection.execute(select(func.count()).select_from(schema.chat_completions)).scalar_one() == 1
    assert store.get(kept.id, "chatcmpl-1") is not None
