from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import func, insert, select

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import TenantChanges, Tenants
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import ReservationRequest
from loramux.platform.errors import Conflict
from loramux.platform.ledger import erasure
from loramux.platform.ledger.entries import adapters_of, priced_adapter
from loramux.platform.ledger.erasure import UsageErasure
from loramux.platform.ledger.price_list import PriceReader
from loramux.platform.ledger.query import UsageQuery
from loramux.platform.ledger.report import answer
from loramux.platform.ledger.rollups import UsageRollups
from loramux.platform.ledger.settlement import Settlement

HOUR_US = 3_600_000_000


class Clock:
    now_us = 1_000_000 * HOUR_US + 5

    def __call__(self) -> int:
        return self.now_us


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def database(migrated_url: str, clock: Clock) -> Any:
    database = Database(migrated_url, clock=clock)
    yield database
    database.close()


@pytest.fixture
def use(database: Database, clock: Clock) -> Callable[..., None]:
    """Settle requests of a tenant, a minute apart."""

    def settle(tenant_id: str, key_id: str, count: int, is_late: bool = False) -> None:
        admission = Admission(database)
        for number in range(count):
            request_id = new_id("req")
            admission.reserve(
                ReservationRequest(
                    request_id=request_id,
                    tenant_id=tenant_id,
                    api_key_id=key_id,
                    model="base",
                    adapter_version_id=None,
                    endpoint="chat",
                    prompt_tokens=10,
                    reserved_tokens=30,
                    end_user=f"person {number % 3}",
                )
            )
            clock.now_us += 60_000_000
            if is_late:
                clock.now_us += HOUR_US
                admission.recover_expired()
            admission.settle(request_id, Settlement(status="completed", prompt_tokens=10, completion_tokens=7))

    return settle


def totals(database: Database, until_us: int, *groups: str) -> dict[tuple[str | None, ...], tuple[int, int]]:
    query = UsageQuery(tenant_id=None, start_us=0, end_us=until_us, bucket=None, group_by=groups, timezone="UTC")
    rows = answer(database, query)
    return {tuple(getattr(row, name) for name in groups): (row.requests, row.completion_tokens) for row in rows}


def rows_in(database: Database, *tables: Any) -> list[int]:
    with database.read() as connection:
        return [connection.execute(select(func.count()).select_from(table)).scalar_one() for table in tables]


def test_erased_tenant_leaves_exact_sums_and_no_names(
    database: Database, clock: Clock, use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(erasure, "AT_ONCE", 2)
    tenants, keys = Tenants(database), ApiKeys(database, "x" * 32)
    gone, stays = tenants.create("gone"), tenants.create("stays")
    gone_key, stays_key = (keys.create(tenant.id, "k").key.id for tenant in (gone, stays))
    use(gone.id, gone_key, 5)
    use(gone.id, gone_key, 1, is_late=True)
    use(stays.id, stays_key, 2)
    end_us = (clock.now_us // HOUR_US + 1) * HOUR_US
    groups = ("tenant", "key", "model", "status")
    before = totals(database, end_us, *groups)
    assert sum(tokens for _, tokens in before.values()) == 8 * 7
    eraser = UsageErasure(database)
    with pytest.raises(Conflict) as caught:
        tenants.purge(gone.id)
    assert caught.value.code == "tenant_active"
    tenants.update(gone.id, TenantChanges(state="suspended"), lambda tenant: None)
    with pytest.raises(Conflict) as caught:
        tenants.purge(gone.id)
    assert caught.value.code == "tenant_in_use"
    assert (eraser.count(gone.id), eraser.erase(gone.id), eraser.erase(gone.id)) == (6, 6, 0)
    assert tenants.purge(gone.id).num_keys == 1
    after = totals(database, end_us, *groups)
    assert after == {(gone.id if one == "gone" else one, *others): sums for (one, *others), sums in before.items()}
    again = tenants.create("gone")
    assert again.id != gone.id
    assert totals(database, end_us, *groups) == after, "the new tenant has no usage"
    assert rows_in(database, schema.usage_events, schema.usage_adjustments) == [2, 0]
    with database.read() as connection:
        series = schema.usage_series.c
        names = connection.scalars(select(series.end_user).where(series.tenant_id == gone.id)).all()
    assert not [name for name in names if "person" in name]


def test_erasure_waits_for_a_fold_that_another_gateway_makes(
    database: Database, clock: Clock, use: Callable[..., None]
) -> None:
    tenants = Tenants(database)
    tenant = tenants.create("busy")
    key = ApiKeys(database, "x" * 32).create(tenant.id, "k").key.id
    use(tenant.id, key, 40)
    folding = threading.Thread(target=UsageRollups(database).fold_all)
    folding.start()
    assert UsageErasure(database).erase(tenant.id) == 40
    folding.join()
    end_us = (clock.now_us // HOUR_US + 1) * HOUR_US
    assert totals(database, end_us, "tenant") == {("busy",): (40, 280)}
    assert rows_in(database, schema.usage_events, schema.usage_batches) == [0, 0]


def test_purged_version_is_never_charged_at_the_bases_price(database: Database) -> None:
    with database.write() as connection:
        connection.execute(
            insert(schema.prices),
            [
                {"id": f"prc_{scope}", "scope": scope, "currency": "USD", "effective_us": 0, "created_us": 0}
                | dict.fromkeys(("prompt_nanos", "cached_nanos", "completion_nanos"), nanos)
                for scope, nanos in (("base", 1), ("adapters", 2))
            ],
        )

    with database.read() as connection:
        adapters = adapters_of(connection, {"adv_gone"})
        book = PriceReader(database).book(connection, 10**15)
    for version_id, scope in ((None, "prc_base"), ("adv_gone", "prc_adapters")):
        price = book.price_of("ten_1", priced_adapter(version_id, adapters), 10**15)
        assert price is not None
        assert price.id == scope
