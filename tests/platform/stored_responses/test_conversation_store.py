from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import func, select

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.platform.accounts.tenants import Tenant, TenantChanges, Tenants
from loramux.platform.stored_responses import conversation_store
from loramux.platform.stored_responses.conversation_store import Answered, ConversationFull, ConversationStore
from loramux.platform.stored_responses.sealing import Sealing
from tests.platform.clocked_databases import FakeClock
from tests.platform.stored_responses.test_response_store import KEY


def item(number: int) -> dict[str, Any]:
    return {"id": f"msg_{number}", "content": "é"}


def test_conversation_expires_when_nothing_is_added(clocked: Database, clock: FakeClock, acme: Tenant) -> None:
    store = ConversationStore(clocked, Sealing(KEY))
    made = store.create(acme.id, {"a": "b"}, 2)
    assert store.get(acme.id, made.id) == made
    clock.advance(86400)
    assert store.append(acme.id, made.id, [item(1)], 2)
    clock.advance(2 * 86400 - 1)
    found = store.get(acme.id, made.id)
    assert found is not None
    assert (found.metadata, found.num_items, store.items(found)) == ({"a": "b"}, 1, [item(1)])
    clock.advance(1)
    assert store.get(acme.id, made.id) is None
    assert ConversationStore(clocked, Sealing(b"another key")).get(acme.id, made.id) is None


def test_concurrent_responses_keep_all_items_in_one_order(clocked: Database, acme: Tenant) -> None:
    store = ConversationStore(clocked, Sealing(KEY))
    made = store.create(acme.id, {}, 1)

    def answer(number: int) -> bool:
        pair = [item(2 * number), item(2 * number + 1)]
        return store.append(acme.id, made.id, pair, 1, Answered(["ada_1" if number % 2 else None]))

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(answer, range(12)))
    found = store.get(acme.id, made.id)
    assert found is not None
    assert set(found.adapter_ids) == {None, "ada_1"}
    items = [one["id"] for one in store.items(found)]
    assert sorted(items) == sorted(item(number)["id"] for number in range(24))
    assert found.num_items == 24
    # The items of a response are together.
    assert all(int(first[4:]) + 1 == int(second[4:]) for first, second in zip(items[::2], items[1::2], strict=True))


def test_items_of_responses_can_exceed_the_limits_twofold(
    clocked: Database, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_store, "MAX_ITEMS", 2)
    store = ConversationStore(clocked, Sealing(KEY))
    made = store.create(acme.id, {}, 1)
    store.append(acme.id, made.id, [item(1), item(2)], 1)
    with pytest.raises(ConversationFull):
        store.append(acme.id, made.id, [item(3)], 1)
    # The second item is known already.
    store.append(acme.id, made.id, [item(2), item(3), item(4)], 1, Answered([None]))
    with pytest.raises(ConversationFull):
        store.append(acme.id, made.id, [item(5)], 1, Answered([None]))
    assert [one["id"] for one in store.items(made)] == ["msg_1", "msg_2", "msg_3", "msg_4"]
    assert store.delete_item(made, "msg_2")
    assert not store.delete_item(made, "msg_2")
    assert store.append(acme.id, made.id, [item(5)], 1, Answered([None]))
    assert [one["id"] for one in store.items(made)] == ["msg_1", "msg_3", "msg_4", "msg_5"]


def test_conversations_are_purged_with_their_tenant(clocked: Database, acme: Tenant) -> None:
    store, tenants = ConversationStore(clocked, Sealing(KEY)), Tenants(clocked)
    kept, lost = tenants.create("kept"), tenants.create("lost")
    made = {tenant.slug: store.create(tenant.id, {}, 1) for tenant in (acme, kept, lost)}
    for one in made.values():
        store.append(one.tenant_id, one.id, [item(1)], 1)
    assert not store.append(kept.id, made["acme"].id, [item(2)], 1)
    tenants.update(acme.id, TenantChanges(state="suspended"), lambda tenant: None)
    tenants.purge(acme.id)
    assert tenants.delete(lost.id)
    with clocked.read() as connection:
        assert connection.execute(select(func.count()).select_from(schema.conversation_items)).scalar_one() == 1
    assert store.items(made["kept"]) == [item(1)]
