from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest

from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.migrations.database import Database
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.periods import Period, Window, window_at
from loramux.platform.quotas.decisions import Charge
from loramux.platform.quotas.overview import QuotaCaller, QuotaOverview
from loramux.platform.quotas.policies import HARD, PLATFORM, SHADOW, SOFT, QuotaPolicies, QuotaPolicy
from loramux.platform.quotas.policy_cache import PolicyCache


def policy(name: str, subject_id: str, mode: str = HARD, metric: str = "requests_per_minute") -> QuotaPolicy:
    scope = PLATFORM if subject_id == PLATFORM else subject_id
    return QuotaPolicy(name, scope, subject_id, None, metric, mode, 1, 1, 0, 0)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (HARD, {"own", "key", "adapter"}),
        (SOFT, {"own", "key", "adapter"}),
        (SHADOW, {"own", "platform", "key", "adapter"}),
    ],
    ids=["hard", "soft", "shadow"],
)
def test_tenants_policy_replaces_the_platforms_unless_in_shadow_mode(mode: str, expected: set[str]) -> None:
    cache = PolicyCache(0)
    for one in (
        policy("platform", PLATFORM),
        policy("own", "tenant", mode),
        policy("key", "key"),
        policy("adapter", "adapter"),
        policy("another tenant's", "other"),
    ):
        cache.put(one)
    assert {binding.policy.id for binding in cache.bindings("tenant", "key", "adapter", False, 0)} == expected
    inherited = {binding.key.subject_id for binding in cache.bindings("stranger", None, None, False, 0)}
    assert inherited == {"stranger"}, "each tenant is counted separately"


def test_only_batches_count_in_their_metric() -> None:
    cache = PolicyCache(0)
    cache.put(policy("all", "key"))
    cache.put(policy("batches", "adapter", metric="batch_tokens_per_day"))
    cache._timezones.update(tenant="UTC")
    for is_batch, expected in ((False, {"all"}), (True, {"all", "batches"})):
        assert {one.policy.id for one in cache.bindings("tenant", "key", "adapter", is_batch, 0)} == expected


class SlowDict(dict[str, Any]):
    def __init__(self) -> None:
        self.is_resting, self.may_go_on = threading.Event(), threading.Event()

    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update(*args, **kwargs)
        self.is_resting.set()
        assert self.may_go_on.wait(60)


def test_concurrent_reader_sees_a_complete_policy(accounts: Database) -> None:
    tenant = Tenants(accounts).create("acme")
    limit = QuotaPolicies(accounts).set(tenant.id, "cost_per_day", 5)
    cache = PolicyCache(0)
    cache._policies = policies = SlowDict()

    def held() -> tuple[bool, bool]:
        with accounts.read() as connection:
            cache.read(connection, (), (), {limit.id})
        (binding,) = cache.held([Charge(policy_id=limit.id, amount=1, window_start_us=0)], tenant.id)
        return binding is not None, cache.has_costs

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(held)
        assert policies.is_resting.wait(60)
        second = threads.submit(held)
        with suppress(TimeoutError):
            second.result(0.2)
        policies.may_go_on.set()
        assert first.result(60) == second.result(60) == (True, True)


def us(*date: int) -> int:
    return int(datetime(*date, tzinfo=UTC).timestamp()) * 1_000_000  # type: ignore[arg-type, misc]


@pytest.mark.parametrize(
    ("period", "zone", "now", "start", "end"),
    [
        (Period.DAY, "UTC", (2026, 5, 4, 12), (2026, 5, 4), (2026, 5, 5)),
        (Period.DAY, "UTC", (2026, 5, 4), (2026, 5, 4), (2026, 5, 5)),
        (Period.MONTH, "UTC", (2026, 2, 28, 23, 59), (2026, 2, 1), (2026, 3, 1)),
        (Period.DAY, "Europe/Berlin", (2026, 3, 29, 12), (2026, 3, 28, 23), (2026, 3, 29, 22)),
        (Period.DAY, "Europe/Berlin", (2026, 10, 25, 12), (2026, 10, 24, 22), (2026, 10, 25, 23)),
        (Period.MONTH, "America/St_Johns", (2027, 1, 1, 3, 29), (2026, 12, 1, 3, 30), (2027, 1, 1, 3, 30)),
        (Period.DAY, "Asia/Kathmandu", (2026, 5, 4, 18, 15), (2026, 5, 4, 18, 15), (2026, 5, 5, 18, 15)),
    ],
    ids=["noon", "midnight", "month", "short day", "long day", "year's end", "a quarter hour"],
)
def test_windows_begin_and_end_at_the_midnights_of_the_timezone(
    period: Period, zone: str, now: tuple[int, ...], start: tuple[int, ...], end: tuple[int, ...]
) -> None:
    assert window_at(period, zone, us(*now)) == Window(us(*start), us(*end))
    assert window_at(period, zone, us(*start)) == Window(us(*start), us(*end))
    assert window_at(period, zone, us(*start) - 1).end_us == us(*start)


def test_trial_policy_on_a_granted_adapter_uses_the_owners_days(accounts: Database) -> None:
    owner, caller = (Tenants(accounts).create(slug, timezone="Asia/Kathmandu") for slug in ("owner", "caller"))
    adapter = AdapterRegistry(accounts).create_adapter(owner.id, "support")
    trial = QuotaPolicies(accounts).propose(adapter.id, "tokens_per_day", 5)
    judged = QuotaOverview(accounts).check(
        QuotaCaller(tenant_id=caller.id, adapter_id=adapter.id), prompt_tokens=4, completion_tokens=4, trial=trial
    )
    assert judged.refusal is not None
