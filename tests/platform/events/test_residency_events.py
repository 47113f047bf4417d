from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event, update

from loramux.adapter_store.registry.pins import AdapterPins
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.engine.protocol.messages import AdapterChange
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.migrations.schema import adapter_versions
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenant, Tenants
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import ReservationRequest
from loramux.platform.events.event_log import EventFilter, EventLog
from loramux.platform.events.residency_events import ResidencyEvents, _requested, used_digests
from loramux.platform.ledger.rollups import UsageRollups
from loramux.platform.ledger.settlement import Settlement
from tests.admin.rest.adapters.ready_versions import add_ready_versions
from tests.platform.clocked_databases import FakeClock
from tests.platform.ready_adapters import add_ready_adapter

DIGEST = "1" * 64


def changes(*kinds: str, first: int = 10, digest: str = DIGEST) -> list[AdapterChange]:
    return [AdapterChange(number=first + place, digest=digest, kind=kind) for place, kind in enumerate(kinds)]


def test_changes_are_told_once_for_every_version_with_the_weights(clocked: Database, acme: Tenant) -> None:
    registry = AdapterRegistry(clocked)
    for name in ("support", "sales"):
        add_ready_versions(clocked, registry.create_adapter(acme.id, name).id, 1, is_new=True)
    watch = ResidencyEvents(clocked, "srv_1")
    # Only the last of several loads and evictions counts.
    assert watch.report(changes("loaded", "struck", "evicted")) == 4
    # The engine repeats what it has not forgotten.
    assert watch.report(changes("loaded", "struck", "evicted", "loaded")) == 2
    assert watch.report(changes("loaded", digest="f" * 64, first=50)) == 0
    assert watch.question().changes_after == 50
    # The engine restarts after the clock was set back.
    assert watch.report(changes("struck", first=20)) == 2
    assert watch.question().changes_after == 20
    log = EventLog(clocked)
    log.advance()
    kinds = {"adapter.loaded", "adapter.evicted", "adapter.struck"}
    told = [one for one in log.read(0, EventFilter(types=kinds)) if one.model == "acme/support"]
    assert [one.type.partition(".")[2] for one in told] == ["struck", "evicted", "loaded", "struck"]
    assert {(one.data["version"], one.data["server"]) for one in told} == {(1, "srv_1")}


def test_events_of_one_report_are_one_statement(clocked: Database, acme: Tenant) -> None:
    add_ready_versions(clocked, AdapterRegistry(clocked).create_adapter(acme.id, "support").id, 9, is_new=True)
    inserts: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        inserts.append(statement) if statement.startswith("INSERT INTO events") else None

    event.listen(clocked._engine, "before_cursor_execute", note)
    new = [change for number in range(1, 10) for change in changes("loaded", first=number, digest=f"{number:x}" * 64)]
    assert ResidencyEvents(clocked, "srv_1").report(new) == 9
    event.remove(clocked._engine, "before_cursor_execute", note)
    assert len(inserts) == 1


class SharedWeights:
    """Two tenants whose adapters have the same weights, unless `is_shared` is false."""

    def __init__(self, database: Database, acme: Tenant, *, is_shared: bool = True) -> None:
        self.database, self.admission = database, Admission(database)
        self.acme, self.globex = acme, Tenants(database).create("globex")
        self.version_ids, self.adapter_ids = {}, {}
        for tenant in (self.acme, self.globex):
            adapter = AdapterRegistry(database).create_adapter(tenant.id, "support")
            add_ready_versions(database, adapter.id, 1)
            (version,) = AdapterRegistry(database).list_versions(adapter.id, 1).data
            self.adapter_ids[tenant.id], self.version_ids[tenant.id] = adapter.id, version.id
        if not is_shared:
            other = adapter_versions.c.id == self.version_ids[self.globex.id]
            with database.write() as connection:
                connection.execute(update(adapter_versions).where(other).values(digest="3" * 64))

    def request(self, tenant: Tenant, *, is_settled: bool) -> None:
        request_id = new_id("req")
        self.admission.reserve(
            ReservationRequest(
                request_id=request_id,
                tenant_id=tenant.id,
                api_key_id=ApiKeys(self.database).create(tenant.id, "test").key.id,
                model="support",
                adapter_id=self.adapter_ids[tenant.id],
                adapter_version_id=self.version_ids[tenant.id],
                endpoint="completions",
                prompt_tokens=1,
                reserved_tokens=1,
            )
        )
        if is_settled:
            self.admission.settle(request_id, Settlement(status="completed", prompt_tokens=1, completion_tokens=0))

    def told(self, kind: str) -> list[str]:
        ResidencyEvents(self.database, "srv_1").report(changes(kind))
        log = EventLog(self.database)
        log.advance()
        return [one.tenant_id for one in log.read(0, EventFilter(types={f"adapter.{kind}"}))]


@pytest.mark.parametrize("stage", ["running", "settled", "summed"])
def test_tenant_does_not_learn_that_another_uses_the_same_weights(
    clocked: Database, acme: Tenant, clock: FakeClock, stage: str
) -> None:
    shared = SharedWeights(clocked, acme)
    assert shared.told("struck") == []
    shared.request(shared.globex, is_settled=stage != "running")
    if stage == "summed":
        UsageRollups(clocked).fold_all()
        clock.advance(20 * 3600)
    assert shared.told("loaded") == [shared.globex.id]
    if stage == "summed":
        clock.advance(6 * 3600)
        assert shared.told("evicted") == []


@pytest.mark.parametrize("is_shared", [False, True])
def test_only_own_use_of_weights_counts(clocked: Database, acme: Tenant, clock: FakeClock, is_shared: bool) -> None:
    shared = SharedWeights(clocked, acme, is_shared=is_shared)
    registry, columns = AdapterRegistry(clocked), adapter_versions.c
    AdapterPins(clocked, registry).set_pinned(add_ready_adapter(clocked, acme.id, "pinned", ["2" * 64]), 1, True)
    with clocked.write() as connection:
        own = columns.id == shared.version_ids[acme.id]
        connection.execute(update(adapter_versions).where(own).values(created_us=clocked.now_us(connection)))
    num_reports = 0

    def used() -> set[str]:
        """Return the digests whose state the tenant can see. It is told of exactly these."""
        nonlocal num_reports
        num_reports += 1
        first = 10 * num_reports
        log = EventLog(clocked)
        log.advance()
        after = max((one.position for one in log.read(0, EventFilter())), default=0)
        pinned = changes("struck", digest="2" * 64, first=first + 1)
        ResidencyEvents(clocked, "srv_1").report([*changes("struck", first=first), *pinned])
        log.advance()
        events = log.read(after, EventFilter(types={"adapter.struck"}))
        seen = used_digests(clocked, (DIGEST, "2" * 64), acme.id)
        assert {one.data["digest"] for one in events if one.tenant_id == acme.id} == seen
        return seen

    assert used() == {DIGEST, "2" * 64}
    clock.advance(25 * 3600)
    assert used() == {"2" * 64}
    shared.request(shared.globex, is_settled=False)
    assert used() == {"2" * 64}
    shared.request(shared.acme, is_settled=True)
    assert used() == {DIGEST, "2" * 64}


def test_requests_are_found_by_indexes(clocked: Database) -> None:
    if not clocked.is_sqlite:
        pytest.skip("the plan is read from SQLite")
    query = str(_requested([DIGEST], ["ten_1"], 10**15).compile(compile_kwargs={"literal_binds": True}))
    with clocked.read() as connection:
        steps = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}")]
    tables = ("reservations", "usage_events", "usage_rollups", "usage_series", "adapter_versions")
    read = [step for step in steps if any(table in step for table in tables)]
    assert len(read) == 7, steps
    assert all(step.startswith("SEARCH") for step in read), steps
    assert any("ix_usage_events_tenant_finished" in step for step in read), steps
    assert any("ix_usage_rollups_tenant_span_start" in step for step in read), steps
