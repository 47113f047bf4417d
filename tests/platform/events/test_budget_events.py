from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import event, update

from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.sharing import AdapterGrants
from loramux.migrations.database import Database
from loramux.migrations.schema import quota_counters
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenant, Tenants
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import ReservationRequest
from loramux.platform.events.budget_events import BudgetEvents
from loramux.platform.events.event_log import Event, EventFilter, EventLog
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.quotas.policies import QuotaPolicies
from tests.platform.clocked_databases import FakeClock


class Budget:
    def __init__(self, database: Database, tenant: Tenant) -> None:
        self.database, self.tenant = database, tenant
        self.admission, self.policies = Admission(database), QuotaPolicies(database)
        self.key = ApiKeys(database).create(tenant.id, "test").key.id
        self.events = BudgetEvents(database, 80)
        self._number = 0

    def use(self, tokens: int, adapter: Any = None) -> None:
        self._number += 1
        request_id = f"req_{self._number:032x}"
        self.admission.reserve(
            ReservationRequest(
                request_id=request_id,
                tenant_id=self.tenant.id,
                api_key_id=self.key,
                model="the-base",
                adapter_id=adapter,
                adapter_version_id=None,
                endpoint="completions",
                prompt_tokens=tokens,
                reserved_tokens=tokens,
            )
        )
        self.admission.settle(request_id, Settlement(status="completed", prompt_tokens=tokens, completion_tokens=0))

    def told(self) -> list[Event]:
        self.events.check()
        log = EventLog(self.database)
        log.advance()
        return log.read(0, EventFilter(types={"budget.threshold"}))


@pytest.fixture
def budget(clocked: Database, acme: Tenant) -> Budget:
    return Budget(clocked, acme)


def test_budget_is_announced_once_per_window(budget: Budget, clock: FakeClock) -> None:
    limit = budget.policies.set(budget.tenant.id, "tokens_per_day", 1000)
    budget.use(799)
    assert budget.told() == []
    budget.use(1)
    (event,) = budget.told()
    assert (event.tenant_id, event.adapter_id) == (budget.tenant.id, None)
    assert event.data["quota_id"] == limit.id
    assert (event.data["metric"], event.data["used"], event.data["percent"]) == ("tokens_per_day", 800, 80)
    assert event.data["window_end"] - event.data["window_start"] == 86_400
    budget.use(150)
    assert len(budget.told()) == 1
    clock.advance(86_400)
    budget.use(900)
    assert [one.data["used"] for one in budget.told()] == [800, 900]


def test_largest_budget_does_not_overflow(budget: Budget) -> None:
    budget.policies.set(budget.tenant.id, "tokens_per_month", 10**18)
    budget.use(1)
    assert budget.told() == []
    with budget.database.write() as connection:
        connection.execute(update(quota_counters).values(used=9 * 10**17))
    assert [one.data["percent"] for one in budget.told()] == [90]


def test_platform_budget_is_announced_to_the_tenant_that_uses_it(budget: Budget) -> None:
    budget.policies.set("platform", "tokens_per_day", 10)
    budget.use(10)
    assert [(one.tenant_id, one.data["scope"]) for one in budget.told()] == [(budget.tenant.id, "platform")]


def test_limit_of_a_shared_adapter_is_not_named_to_the_grantee(budget: Budget) -> None:
    owner = Tenants(budget.database).create("globex")
    adapter = AdapterRegistry(budget.database).create_adapter(owner.id, "gift")
    AdapterGrants(budget.database).add(adapter, budget.tenant.id)
    budget.policies.set(adapter.id, "tokens_per_day", 10)
    budget.use(10, adapter.id)
    (event,) = budget.told()
    assert (event.tenant_id, event.data["quota_id"], event.model) == (budget.tenant.id, None, "globex/gift")


@pytest.mark.parametrize(("mode", "number"), [("hard", 1), ("soft", 1), ("shadow", 0)])
def test_shadow_budget_stays_in_the_shadow(budget: Budget, mode: str, number: int) -> None:
    budget.policies.set(budget.tenant.id, "tokens_per_day", 10, mode=mode)
    budget.use(9)
    assert len(budget.told()) == number


def test_other_windows_are_not_read(budget: Budget) -> None:
    """A server asks every ten seconds. The counters of earlier days and months must not slow it down."""
    if not budget.database.is_sqlite:
        pytest.skip("the plan is read from SQLite")
    asked: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        asked.append((statement, parameters)) if "quota_counters" in statement else None

    event.listen(budget.database._engine, "before_cursor_execute", note)
    budget.events.check()
    event.remove(budget.database._engine, "before_cursor_execute", note)
    ((statement, parameters),) = asked
    with budget.database.read() as connection:
        steps = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)]
    assert "SEARCH quota_counters USING INDEX ix_quota_counters_unannounced (window_start_us=?)" in steps


def test_passed_window_is_not_announced_later(budget: Budget, clock: FakeClock) -> None:
    budget.policies.set(budget.tenant.id, "tokens_per_day", 10)
    budget.use(9)
    clock.advance(86_400)
    assert budget.told() == []
