"""The bytes of what is stored for a tenant are counted exactly, and limited."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from alembic import command
from sqlalchemy import func, select

from loramux.admin.serving.expired_rows import ExpiredRows
from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.migrations.storage_triggers import storage_triggers
from loramux.platform.accounts.tenants import Tenant, Tenants
from loramux.platform.quotas.decisions import QuotaExceeded
from loramux.platform.quotas.metrics import STORED_BYTES
from loramux.platform.quotas.overview import QuotaCaller, QuotaOverview
from loramux.platform.quotas.policies import PLATFORM, QuotaPolicies
from loramux.platform.stored_responses.background_store import BackgroundStore, NewEvents
from loramux.platform.stored_responses.chat_store import ChatStore
from loramux.platform.stored_responses.conversation_store import Answered, ConversationStore
from loramux.platform.stored_responses.response_store import ResponseStore
from loramux.platform.stored_responses.sealing import Sealing
from loramux.platform.stored_responses.stored_objects import StoredObjects
from tests.platform.clocked_databases import FakeClock
from tests.platform.lock_waits import until_wait
from tests.platform.stored_responses.test_background_store import queued
from tests.platform.stored_responses.test_chat_store import MESSAGES
from tests.platform.stored_responses.test_chat_store import stored as chat
from tests.platform.stored_responses.test_response_store import KEY, stored

EVENTS = NewEvents(0, [b"data: 0\n\n"])


def counted(database: Database, tenant: Tenant) -> int:
    table = schema.stored_bytes.c
    with database.read() as connection:
        return connection.execute(select(table.num_bytes).where(table.tenant_id == tenant.id)).scalar() or 0


def summed(database: Database, tenant: Tenant) -> int:
    """The bytes of a tenant's rows."""
    responses, chats, conversations = schema.responses.c, schema.chat_completions.c, schema.conversations.c
    sizes = (
        (func.length(responses.content), responses),
        (func.length(chats.completion) + func.length(chats.messages), chats),
        (conversations.num_bytes, conversations),
    )
    queries = [select(func.sum(size)).where(table.tenant_id == tenant.id) for size, table in sizes]
    with database.read() as connection:
        return sum(int(connection.execute(query).scalar() or 0) for query in queries)


def message(number: int, length: int = 10) -> dict[str, Any]:
    content = random.Random(length).randbytes(length).hex()
    return {"id": f"msg_{number}", "type": "message", "role": "user", "content": content}


def test_every_change_is_counted(clocked: Database, clock: FakeClock, acme: Tenant) -> None:
    other, sealing, dice = Tenants(clocked).create("other"), Sealing(KEY), random.Random(5)
    responses, chats = ResponseStore(clocked, sealing), ChatStore(clocked, sealing)
    conversations, background = ConversationStore(clocked, sealing), BackgroundStore(clocked, sealing)
    sizes = set()
    for number in range(25):
        tenant, days = dice.choice((acme, other)), dice.randint(1, 9)
        responses.put(replace(stored(tenant, f"resp_{number}"), input=[message(1, dice.randrange(999))]), days)
        chats.put(chat(tenant, number, a=dice.randbytes(dice.randrange(100)).hex()), MESSAGES, days)
        if dice.random() < 0.5:
            chats.update(chat(tenant, number, a="b"))
        made = conversations.create(tenant.id, {"a": "b" * dice.randrange(9)}, days)
        conversations.append(tenant.id, made.id, [message(one, dice.randrange(99)) for one in range(4)], days)
        conversations.append(tenant.id, made.id, [message(9)], days, Answered([None]))
        conversations.update(made, {"a": "longer or shorter"})
        conversations.delete_item(made, "msg_2")
        pending = queued(tenant, 100 + number)
        background.begin(pending, EVENTS, days)
        background.finish(replace(pending, state="completed", input=[message(1, 999)]), EVENTS, 1)
        if dice.random() < 0.3:
            responses.delete(tenant.id, f"resp_{number}")
            chats.delete(tenant.id, f"chatcmpl-{number}")
            conversations.delete(made)
        if number % 5 == 0:
            clock.advance(86400)
            ExpiredRows(clocked).sweep()
        for one in (acme, other):
            assert counted(clocked, one) == summed(clocked, one)
        sizes.add(counted(clocked, acme))
    assert len(sizes) > 10
    clock.advance(10 * 86400)
    ExpiredRows(clocked).sweep()
    assert (counted(clocked, acme), counted(clocked, other)) == (0, 0)


def test_limit_refuses_and_deletions_free(clocked: Database, acme: Tenant) -> None:
    store = StoredObjects.over(clocked, KEY)
    policies = QuotaPolicies(clocked)
    policies.set(acme.id, STORED_BYTES, 1000)
    for number in (3, 4):
        store.responses.put(stored(acme, f"resp_{number}"), 1)
    full = counted(clocked, acme)
    policies.set(acme.id, STORED_BYTES, full)
    attempts: list[Callable[[], Any]] = [
        lambda: store.check_room(acme.id),
        lambda: store.responses.put(stored(acme, "resp_5"), 1),
        lambda: store.background.begin(queued(acme, 3), EVENTS, 1),
        lambda: store.chats.put(chat(acme), MESSAGES, 1),
        lambda: store.conversations.create(acme.id, {}, 1),
    ]
    for attempt in attempts:
        with pytest.raises(QuotaExceeded) as refused:
            attempt()
        assert (refused.value.code, refused.value.param) == ("insufficient_quota", STORED_BYTES)
    assert "delete stored responses" in refused.value.message
    (limit,) = QuotaOverview(clocked).effective(QuotaCaller(tenant_id=acme.id))
    assert (limit.used, limit.remaining) == (full, 0)
    store.responses.delete(acme.id, "resp_3")
    store.check_room(acme.id)
    assert store.conversations.create(acme.id, {}, 1)


def test_objects_cannot_grow_beyond_the_limit(clocked: Database, acme: Tenant) -> None:
    store = StoredObjects.over(clocked, KEY)
    store.chats.put(chat(acme), MESSAGES, 1)
    conversation = store.conversations.create(acme.id, {}, 1)
    QuotaPolicies(clocked).set(acme.id, STORED_BYTES, counted(clocked, acme))
    noise = random.Random(1).randbytes(200).hex()
    attempts: list[Callable[[], Any]] = [
        lambda: store.chats.update(chat(acme, a=noise)),
        lambda: store.conversations.update(conversation, {"a": noise}),
        lambda: store.conversations.append(acme.id, conversation.id, [message(1)], 1),
    ]
    for attempt in attempts:
        with pytest.raises(QuotaExceeded):
            attempt()
    assert store.chats.get(acme.id, "chatcmpl-1") == chat(acme)
    # The answer of a request that was admitted is kept.
    assert store.conversations.append(acme.id, conversation.id, [message(1)], 1, Answered([None]))
    assert counted(clocked, acme) == summed(clocked, acme)


def test_gateways_that_store_at_once_pass_no_limit(clocked: Database, acme: Tenant) -> None:
    gateways = [StoredObjects.over(clocked, KEY) for _ in range(4)]
    gateways[0].responses.put(stored(acme, "resp_99"), 1)
    size = counted(clocked, acme)
    # The policy is the platform's, which has a counter for each tenant.
    # Compression makes equally long responses differ by a byte.
    limit = 6 * size + size // 2
    QuotaPolicies(clocked).set(PLATFORM, STORED_BYTES, limit)

    def put(number: int) -> bool:
        try:
            return gateways[number % 4].responses.put(stored(acme, f"resp_{number:02}"), 1)
        except QuotaExceeded:
            return False

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(put, range(24))) == 5
    assert counted(clocked, acme) == summed(clocked, acme) <= limit


def test_soft_limit_only_counts(clocked: Database, acme: Tenant) -> None:
    store = StoredObjects.over(clocked, KEY)
    QuotaPolicies(clocked).set(acme.id, STORED_BYTES, 1, mode="soft")
    store.check_room(acme.id)
    assert store.responses.put(stored(acme), 1)
    (limit,) = QuotaOverview(clocked).effective(QuotaCaller(tenant_id=acme.id))
    assert limit.num_exceeded == 1


def test_deleted_tenant_leaves_no_counter(clocked: Database, acme: Tenant) -> None:
    store, tenants = StoredObjects.over(clocked, KEY), Tenants(clocked)
    store.responses.put(stored(acme), 1)
    QuotaPolicies(clocked).set(acme.id, STORED_BYTES, 10_000)
    assert tenants.delete(acme.id)
    with clocked.read() as connection:
        assert connection.execute(select(schema.stored_bytes)).all() == []


def test_upgrade_counts_what_is_stored(database_url: str) -> None:
    database = Database(database_url)
    database.upgrade()
    tenant = Tenants(database).create("acme")
    Tenants(database).create("empty")
    store = StoredObjects.over(database, KEY)
    store.responses.put(stored(tenant), 1)
    store.chats.put(chat(tenant), MESSAGES, 1)
    store.conversations.create(tenant.id, {"a": "b"}, 1)
    before = counted(database, tenant)
    undo_step(database)
    redo_step(database)
    with database.read() as connection:
        assert [tuple(row) for row in connection.execute(select(schema.stored_bytes))] == [(tenant.id, before)]
    store.responses.delete(tenant.id, "resp_1")
    assert counted(database, tenant) == summed(database, tenant) < before
    database.close()


def undo_step(database: Database) -> None:
    """Undo step 0030, but none of the later ones."""
    with database.write() as connection:
        dialect = connection.dialect.name
        for table, name in storage_triggers(dialect):
            connection.exec_driver_sql(f"DROP TRIGGER {name}" + (f" ON {table}" if dialect == "postgresql" else ""))
        connection.exec_driver_sql("DROP TABLE stored_bytes")
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0029'")


def redo_step(database: Database) -> None:
    config = database._alembic_config()
    command.upgrade(config, "0030")
    # The later steps have not been undone.
    command.stamp(config, "head")


def test_upgrade_counts_no_response_that_is_deleted_meanwhile(migrated_postgres_url: str) -> None:
    database = Database(migrated_postgres_url)
    tenant = Tenants(database).create("acme")
    store = StoredObjects.over(database, KEY)
    for number in (1, 2):
        store.responses.put(stored(tenant, f"resp_{number}"), 1)
    undo_step(database)
    with ThreadPoolExecutor(1) as threads, psycopg.connect(migrated_postgres_url) as deleting:
        deleting.execute("DELETE FROM responses WHERE id = 'resp_1'")
        upgrading = threads.submit(redo_step, database)
        until_wait(migrated_postgres_url, 1)
        deleting.commit()
        upgrading.result(60)
    assert counted(database, tenant) == summed(database, tenant) > 0
    database.close()


@pytest.mark.parametrize("kind", ["response", "chat completion"])
def test_storing_does_not_deadlock_with_the_deletion_of_the_tenant(migrated_postgres_url: str, kind: str) -> None:
    database = Database(migrated_postgres_url)
    tenant = Tenants(database).create("acme")
    store = StoredObjects.over(database, KEY)
    QuotaPolicies(database).set(tenant.id, STORED_BYTES, 100_000)
    # Creates the counter.
    store.responses.put(stored(tenant, "resp_0"), 1)

    def put() -> bool:
        if kind == "response":
            return store.responses.put(stored(tenant), 1)
        return store.chats.put(chat(tenant), MESSAGES, 1)

    with ThreadPoolExecutor(1) as threads, psycopg.connect(migrated_postgres_url) as deleting:
        # In the order in which the deletion of a tenant locks.
        deleting.execute("SELECT id FROM tenants FOR UPDATE")
        storing = threads.submit(put)
        until_wait(migrated_postgres_url, 1)
        deleting.execute("SELECT * FROM quota_counters FOR UPDATE NOWAIT")
        deleting.rollback()
        assert storing.result(60)
    database.close()
