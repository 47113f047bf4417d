from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psycopg
import pytest
from sqlalchemy import insert, select, update

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import Closing, Extension, Operation, ReservationRequest
from loramux.platform.generation.requests_in_flight import RequestsInFlight
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.quotas.policies import QuotaPolicies
from tests.platform.lock_waits import PATIENCE_S, until_wait
from tests.platform.ready_adapters import add_ready_adapter, digest_of


@dataclass(frozen=True, slots=True)
class Running:
    url: str
    database: Database
    request_id: str
    lease_expires_us: int

    def settling(self, completion_tokens: int = 5) -> Closing:
        settlement = Settlement(status="completed", prompt_tokens=10, completion_tokens=completion_tokens)
        return Closing(request_id=self.request_id, settlement=settlement)

    def recovering(self) -> Closing:
        settlement = Settlement(status="recovered", prompt_tokens=10, completion_tokens=0)
        return Closing(request_id=self.request_id, settlement=settlement, lease_expires_us=self.lease_expires_us)

    def extending(self) -> Extension:
        return Extension(request_id=self.request_id, tokens=1)

    def ledger(self) -> tuple[int, list[int], list[str]]:
        with self.database.read() as connection:
            events = connection.execute(select(schema.usage_events.c.request_id)).all()
            adjustments = connection.execute(select(schema.usage_adjustments.c.completion_tokens)).scalars().all()
            states = connection.execute(select(schema.reservations.c.state)).scalars().all()
        return len(events), list(adjustments), list(states)


@pytest.fixture
def running(migrated_postgres_url: str) -> Iterator[Running]:
    database = Database(migrated_postgres_url)
    tenant = Tenants(database).create("acme")
    QuotaPolicies(database).set(tenant.id, "tokens_per_minute", 1000)
    request = ReservationRequest(
        request_id=new_id("req"),
        tenant_id=tenant.id,
        api_key_id=ApiKeys(database).create(tenant.id, "key").key.id,
        model="base",
        adapter_version_id=None,
        endpoint="completions",
        prompt_tokens=10,
        reserved_tokens=30,
    )
    Admission(database).reserve(request)
    with database.read() as connection:
        lease_expires_us = connection.execute(select(schema.reservations.c.lease_expires_us)).scalar_one()
    yield Running(migrated_postgres_url, database, request.request_id, lease_expires_us)
    database.close()


def at_once(running: Running, first: Operation, second: Operation) -> list[object]:
    """Run two operations and return their outcomes.

    The second starts when the first has done everything except commit.
    """
    with psycopg.connect(running.url) as holder, ThreadPoolExecutor(2) as threads:
        # This is the last table that a settlement writes to.
        holder.execute("LOCK TABLE usage_batches IN ACCESS EXCLUSIVE MODE")
        outcomes = []
        for number, operation in enumerate((first, second), 1):
            outcomes.append(threads.submit(Admission(running.database).commit, [operation]))
            until_wait(running.url, number)
        holder.rollback()
        return [outcome.result(PATIENCE_S)[0] for outcome in outcomes]


def test_of_two_concurrent_settlements_only_one_counts(running: Running) -> None:
    assert at_once(running, running.settling(5), running.settling(6)) == [True, False]
    assert running.ledger() == (1, [], [])


def test_concurrently_settled_request_is_not_extended(running: Running) -> None:
    assert at_once(running, running.settling(), running.extending()) == [True, False]
    assert running.ledger() == (1, [], [])


def test_concurrently_settled_request_is_not_recovered(running: Running) -> None:
    assert at_once(running, running.settling(), running.recovering()) == [True, False]
    assert running.ledger() == (1, [], [])


def test_concurrently_recovered_request_is_corrected_once(running: Running) -> None:
    assert at_once(running, running.recovering(), running.settling(5)) == [True, True]
    assert running.ledger() == (1, [5], [])
    assert Admission(running.database).commit([running.settling(6)]) == [False]


def test_request_whose_server_was_only_slow_is_not_recovered(running: Running) -> None:
    """The server extends its lease after another server has found that the lease had ended."""
    with running.database.write() as connection:
        connection.execute(update(schema.reservations).values(lease_expires_us=running.lease_expires_us + 1))
    assert Admission(running.database).commit([running.recovering(), running.settling(5)]) == [False, True]
    assert running.ledger() == (1, [], [])


def test_cancelling_a_versions_requests_locks_them_in_the_order_of_settlements(running: Running) -> None:
    database, table = running.database, schema.reservations
    with database.read() as connection:
        tenant_id, key_id = connection.execute(select(table.c.tenant_id, table.c.api_key_id)).one()
    adapter_id = add_ready_adapter(database, tenant_id, "support", [digest_of("support")])
    with database.read() as connection:
        versions = select(schema.adapter_versions.c.id).where(schema.adapter_versions.c.adapter_id == adapter_id)
        version_id = connection.execute(versions).scalar_one()
    last, first = sorted((new_id("req"), new_id("req")), reverse=True)
    # The table then has them in the other order.
    for request_id in (last, first):
        request = ReservationRequest(
            request_id=request_id,
            tenant_id=tenant_id,
            api_key_id=key_id,
            model="acme/support",
            adapter_version_id=version_id,
            endpoint="completions",
            prompt_tokens=10,
            reserved_tokens=30,
        )
        Admission(database).reserve(request)
    lock = "SELECT id FROM reservations WHERE id = %s FOR UPDATE NOWAIT"
    with psycopg.connect(running.url) as settling, ThreadPoolExecutor(1) as threads:
        settling.execute(lock, [first])
        cancelling = threads.submit(RequestsInFlight(database).cancel_versions, [version_id], tenant_id)
        until_wait(running.url, 1)
        try:
            settling.execute(lock, [last])
        finally:
            settling.rollback()
        assert sorted(cancelling.result(PATIENCE_S)) == [first, last]


@pytest.mark.parametrize("how", ["settle", "extend", "recover"])
def test_settlement_by_an_older_server_is_kept(running: Running, how: str) -> None:
    """An older server settled the request in the ledger without removing its row in `reservations`."""
    assert Admission(running.database).settle(running.request_id, running.settling().settlement)
    with running.database.write() as connection:
        [event] = connection.execute(select(schema.usage_events)).mappings().all()
        row = {name: event[name] for name in ("tenant_id", "api_key_id", "model", "endpoint", "prompt_tokens")}
        left = {"id": running.request_id, "reserved_tokens": 30, "charges": [], "checkpoint_tokens": 0, "created_us": 1}
        connection.execute(insert(schema.reservations).values(**row, **left, state="settled", lease_expires_us=2))
    operation = {"settle": running.settling(7), "extend": running.extending(), "recover": running.recovering()}[how]
    if how == "recover":
        with running.database.write() as connection:
            connection.execute(update(schema.reservations).values(lease_expires_us=running.lease_expires_us))
    assert Admission(running.database).commit([operation]) == [False]
    assert running.ledger() == (1, [], ["settled"])
