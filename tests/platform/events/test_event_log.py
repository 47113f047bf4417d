"""Numbers follow the order of commits, and a reader that has seen a number never misses a lower one."""

from __future__ import annotations

import threading

import pytest

from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.migrations.database import Database
from loramux.migrations.events import note_event
from loramux.migrations.paging import Page
from loramux.platform.accounts.tenants import Tenant, Tenants
from loramux.platform.events.event_log import EventFilter, EventLog
from tests.platform.clocked_databases import FakeClock, empty


def note(database: Database, tenant_id: str, number: int, adapter_id: str | None = None) -> None:
    with database.write() as connection:
        now_us = database.now_us(connection)
        note_event(connection, now_us, "alias.moved", {"n": number}, tenant_id=tenant_id, adapter_id=adapter_id)


def test_each_tenant_has_numbers_without_gaps(clocked: Database, acme: Tenant) -> None:
    log, globex = EventLog(clocked), Tenants(clocked).create("globex")
    assert (log.advance(), log.head(acme.id)) == (0, 0)
    for number, tenant in enumerate((acme, globex, acme, acme, globex)):
        note(clocked, tenant.id, number)
    assert log.read(0, EventFilter()) == []
    assert log.advance() == 5
    assert [(one.position, one.data["n"]) for one in log.read(0, EventFilter())] == [
        (1, 0),
        (2, 1),
        (3, 2),
        (4, 3),
        (5, 4),
    ]
    of_acme = log.read(1, EventFilter(tenant_id=acme.id))
    assert [(one.sequence, one.data["n"], one.tenant) for one in of_acme] == [(2, 2, "acme"), (3, 3, "acme")]
    assert (log.head(None), log.head(acme.id), log.head(globex.id)) == (5, 3, 2)


def test_filters_by_adapter_and_type(clocked: Database, acme: Tenant) -> None:
    log = EventLog(clocked)
    adapter = AdapterRegistry(clocked).create_adapter(acme.id, "support")
    note(clocked, acme.id, 1)
    note(clocked, acme.id, 2, adapter.id)
    log.advance()
    (found,) = log.read(0, EventFilter(adapter_ids={adapter.id}))
    assert (found.data["n"], found.model) == (2, "acme/support")
    assert log.read(0, EventFilter(types={"version.ready"})) == []
    assert len(log.read(0, EventFilter(types={"alias.moved"}), limit=1)) == 1


def test_pages_go_from_the_newest_event_to_older_ones(clocked: Database, acme: Tenant) -> None:
    log, globex = EventLog(clocked), Tenants(clocked).create("globex")
    for number, tenant in enumerate((acme, acme, globex, acme)):
        note(clocked, tenant.id, number)
    of_all, of_acme = EventFilter(), EventFilter(tenant_id=acme.id)
    # Events without a number are not shown, because their order is not known yet.
    assert log.page(of_all, 10) == Page((), False)
    log.advance()
    newest = log.page(of_all, 3)
    assert ([one.data["n"] for one in newest.data], newest.has_more) == ([3, 2, 1], True)
    assert [one.data["n"] for one in log.page(of_all, 3, after=newest.data[-1].id).data] == [0]
    assert [one.data["n"] for one in log.page(of_all, 2, before=newest.data[-1].id).data] == [3, 2]
    assert [one.data["n"] for one in log.page(of_acme, 2, after=newest.data[0].id).data] == [1, 0]
    # Neither an unknown identifier nor that of another tenant's event says where that event is.
    for unknown in ("evt_" + "f" * 32, newest.data[1].id):
        assert log.page(of_acme, 2, after=unknown) == Page((), False)
        assert [one.data["n"] for one in log.page(of_acme, 3, before=unknown).data] == [3, 1, 0]
    assert log.page(EventFilter(types={"version.ready"}), 3) == Page((), False)


def test_event_that_commits_late_gets_a_later_number(migrated_postgres_url: str) -> None:
    """An identifier made earlier does not let an event slip in below a number that was already read."""
    database = Database(migrated_postgres_url)
    tenant, log = Tenants(database).create("acme"), EventLog(database)
    with database.write() as connection:
        note_event(connection, 0, "alias.moved", {"n": "late"}, tenant_id=tenant.id)
        note(database, tenant.id, 2)
        assert log.advance() == 1
    assert log.advance() == 2
    assert [one.data["n"] for one in log.read(0, EventFilter(tenant_id=tenant.id))] == [2, "late"]
    database.close()


@pytest.mark.parametrize("url", ["sqlite_accounts_url", "postgres_accounts_url"])
def test_servers_that_number_together_give_each_number_once(request: pytest.FixtureRequest, url: str) -> None:
    databases = [Database(request.getfixturevalue(url)) for _ in range(3)]
    tenant = Tenants(databases[0]).create("acme")

    def write_and_number(database: Database) -> None:
        for number in range(8):
            note(database, tenant.id, number)
            EventLog(database).advance()

    threads = [threading.Thread(target=write_and_number, args=(one,)) for one in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = EventLog(databases[0])
    assert log.advance() == 24
    assert [one.sequence for one in log.read(0, EventFilter(tenant_id=tenant.id))] == list(range(1, 25))
    empty(databases[0])
    for database in databases:
        database.close()


def test_old_events_are_swept_and_numbers_go_on(clocked: Database, acme: Tenant, clock: FakeClock) -> None:
    log = EventLog(clocked)
    note(clocked, acme.id, 1)
    log.advance()
    clock.advance(2 * 86_400)
    note(clocked, acme.id, 2)
    log.advance()
    assert log.sweep(kept_days=1) == 1
    assert [one.data["n"] for one in log.read(0, EventFilter())] == [2]
    assert (log.oldest(acme.id), log.oldest(None)) == (2, 2)
    clock.advance(2 * 86_400)
    assert log.sweep(kept_days=1) == 1
    assert (log.oldest(acme.id), log.head(acme.id)) == (None, 2)


def test_sweep_leaves_a_number_of_events_of_each_tenant(clocked: Database, acme: Tenant) -> None:
    log, globex = EventLog(clocked), Tenants(clocked).create("globex")
    for number in range(5):
        note(clocked, acme.id, number)
    note(clocked, globex.id, 9)
    log.advance()
    note(clocked, acme.id, 5)
    assert log.sweep(kept_days=1, max_kept=2) == 3
    log.advance()
    assert [one.data["n"] for one in log.read(0, EventFilter(tenant_id=acme.id))] == [3, 4, 5]
    assert [one.data["n"] for one in log.read(0, EventFilter(tenant_id=globex.id))] == [9]


def test_deleted_tenant_takes_its_events(clocked: Database, acme: Tenant) -> None:
    log = EventLog(clocked)
    note(clocked, acme.id, 1)
    log.advance()
    note(clocked, acme.id, 2)
    assert Tenants(clocked).delete(acme.id)
    assert log.advance() == 1
    assert log.read(0, EventFilter()) == []
    assert log.head(acme.id) == 0
