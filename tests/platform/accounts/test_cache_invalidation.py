from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import select, update

from loramux.migrations import schema
from loramux.migrations.cache_triggers import CACHED_TABLES
from loramux.migrations.database import Database
from loramux.migrations.listener import CacheListener
from loramux.platform.accounts import cache_invalidation
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.cache_invalidation import CacheInvalidation
from loramux.platform.accounts.change_watch import MAX_STALE_US
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.quotas.policies import QuotaPolicies

WITHIN_S = 20.0
NOW_US = 10**15
"""The gateways' time stands still, so that no cache entry expires and only a poll can remove it."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_invalidation, "POLL_INTERVAL_S", 0.2)
    monkeypatch.setattr(cache_invalidation, "RETRY_S", 0.05)


class OneGateway:
    def __init__(self, database: Database) -> None:
        self.keys, self.tenants = ApiKeys(database), Tenants(database)
        self.num_told = 0
        self.num_polls = 0
        self.invalidation = CacheInvalidation(
            database,
            (self.keys.forget_recent, self.tenants.forget_recent, self._count),
            confirm=(self.keys.confirm_recent, self.tenants.confirm_recent, self._count_poll),
        )

    def _count(self) -> None:
        self.num_told += 1

    def _count_poll(self, _: int) -> None:
        self.num_polls += 1


@contextmanager
def two_gateways(database_url: str) -> Iterator[tuple[OneGateway, OneGateway]]:
    databases = [Database(database_url, clock=lambda: NOW_US) for _ in range(2)]
    gateways = OneGateway(databases[0]), OneGateway(databases[1])
    try:
        until(lambda: all(gateway.num_told for gateway in gateways))
        yield gateways
    finally:
        for gateway, database in zip(gateways, databases, strict=True):
            gateway.invalidation.close()
            # `close` does not wait for long.
            gateway.invalidation._thread.join(WITHIN_S)
            assert not gateway.invalidation._thread.is_alive()
            database.close()


def until(is_so: Callable[[], object]) -> None:
    started = time.monotonic()
    while not is_so():
        assert time.monotonic() - started < WITHIN_S
        time.sleep(0.01)


def test_key_revoked_in_one_gateway_is_rejected_by_the_other(migrated_url: str) -> None:
    with two_gateways(migrated_url) as (one, other):
        tenant = one.tenants.create("acme")
        key = one.keys.create(tenant.id, "test")
        settle(one, other)
        assert other.keys.authenticate(key.secret) is not None
        assert other.keys.recent(key.secret) is not None, "it is cached"
        one.keys.revoke(key.key.id)
        until(lambda: other.keys.recent(key.secret) is None)
        assert other.keys.authenticate(key.secret) is None


def test_keys_and_shares_are_kept_while_the_database_is_heard(migrated_url: str) -> None:
    now_us, confirmed_us = [10**15], [0]
    database = Database(migrated_url, clock=lambda: now_us[0])
    keys, tenants = ApiKeys(database), Tenants(database)
    tenant = tenants.create("acme")
    key = keys.create(tenant.id, "test")

    def confirm(at_us: int) -> None:
        keys.confirm_recent(at_us)
        confirmed_us[0] = at_us

    invalidation = CacheInvalidation(
        database, (keys.forget_recent, tenants.forget_recent), confirm=(tenants.confirm_recent, confirm)
    )
    until(lambda: confirmed_us[0])
    assert keys.authenticate(key.secret) is not None
    tenants.share(tenant.id)
    for _ in range(3):
        now_us[0] += MAX_STALE_US - 1
        until(lambda: confirmed_us[0] == now_us[0])
        assert keys.recent(key.secret) is not None, "no poll found a change"
        assert tenants.recent_share(tenant.id) is not None
    invalidation.close()
    invalidation._thread.join(WITHIN_S)
    now_us[0] += MAX_STALE_US
    assert keys.recent(key.secret) is None
    assert tenants.recent_share(tenant.id) is None
    database.close()


def test_polling_makes_up_for_a_lost_notification(migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(self: CacheListener, timeout_s: float) -> None:
        self._stopped.wait(timeout_s)

    monkeypatch.setattr(CacheListener, "wait", deaf)
    with two_gateways(migrated_postgres_url) as (one, other):
        tenant = one.tenants.create("acme")
        key = one.keys.create(tenant.id, "test")
        settle(one, other)
        assert other.keys.authenticate(key.secret) is not None
        assert other.keys.recent(key.secret) is not None, "it is cached"
        one.keys.revoke(key.key.id)
        until(lambda: other.keys.recent(key.secret) is None)


def test_notification_arrives_before_the_next_poll(migrated_postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_invalidation, "POLL_INTERVAL_S", 60.0)
    with two_gateways(migrated_postgres_url) as (one, other):
        told = other.num_told
        QuotaPolicies(one.keys._database).set(one.tenants.create("acme").id, "tokens_per_minute", 10)
        until(lambda: other.num_told > told)


def test_tenant_suspended_with_sql_is_noticed(migrated_url: str) -> None:
    with two_gateways(migrated_url) as (one, other):
        tenant = one.tenants.create("acme")
        key = one.keys.create(tenant.id, "test")
        settle(one, other)
        other.tenants.share(tenant.id)
        assert other.keys.authenticate(key.secret) is not None
        with one.keys._database.write() as connection:
            connection.execute(update(schema.tenants).values(state="suspended"))
        until(lambda: other.keys.recent(key.secret) is None)
        until(lambda: other.tenants.recent_share(tenant.id) is None)
        assert other.keys.authenticate(key.secret) is None


def test_watching_resumes_after_a_lost_connection(migrated_postgres_url: str) -> None:
    with two_gateways(migrated_postgres_url) as (one, other):
        key = one.keys.create(one.tenants.create("acme").id, "test")
        told = other.num_told
        with one.keys._database.write() as connection:
            connection.exec_driver_sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        # A new connection clears the caches immediately, because it may have missed notifications.
        until(lambda: other.num_told > told)
        settle(one, other)
        assert other.keys.authenticate(key.secret) is not None
        one.keys.revoke(key.key.id)
        until(lambda: other.keys.recent(key.secret) is None)


def test_every_cached_table_has_triggers_after_an_upgrade(database: Database) -> None:
    def epoch() -> int:
        with database.read() as connection:
            value = schema.signals.c.value
            return connection.execute(select(value).where(schema.signals.c.name == "caches")).scalar_one_or_none() or 0

    database.upgrade()
    tenant = Tenants(database).create("acme")
    ApiKeys(database).create(tenant.id, "test")
    QuotaPolicies(database).set(tenant.id, "tokens_per_minute", 10)
    for table in CACHED_TABLES:
        before = epoch()
        with database.write() as connection:
            connection.exec_driver_sql(f"UPDATE {table} SET created_us = created_us + 1")
        assert epoch() == before + 1, table


def settle(*gateways: OneGateway) -> None:
    """Wait until the gateways have been told of all changes. A poll that is in progress may have looked before them."""
    seen = [gateway.num_polls for gateway in gateways]
    until(lambda: all(gateway.num_polls >= num + 2 for gateway, num in zip(gateways, seen, strict=True)))
