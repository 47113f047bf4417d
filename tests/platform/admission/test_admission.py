from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as futures_wait
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import delete, select

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenant, Tenants
from loramux.platform.admission import admission as admission_module
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import (
    Closing,
    Extension,
    Operation,
    Outcome,
    RequestCheckpoint,
    ReservationRequest,
)
from loramux.platform.admission.reservation_rows import LEASE_US
from loramux.platform.admission.transaction import AdmissionTransaction
from loramux.platform.errors import Conflict, InvalidRequest, NotFound
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.quotas.counters import UNITS
from loramux.platform.quotas.decisions import QuotaExceeded, RequestTooLarge
from loramux.platform.quotas.metrics import MAX_AMOUNT, MAX_RATE
from loramux.platform.quotas.policies import QuotaPolicies

MakeRequest = Callable[..., ReservationRequest]
LIMITING_ANY_REQUEST = (
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_requests",
    "tokens_per_day",
    "tokens_per_month",
)


@pytest.fixture
def make_request(acme: Tenant, acme_key: str) -> MakeRequest:
    def make(prompt: int = 10, most: int = 30) -> ReservationRequest:
        return ReservationRequest(
            request_id=new_id("req"),
            tenant_id=acme.id,
            api_key_id=acme_key,
            model="acme/support@1",
            adapter_version_id=None,
            endpoint="completions",
            prompt_tokens=prompt,
            reserved_tokens=most,
        )

    return make


def used(prompt: int, completion: int) -> Settlement:
    return Settlement(status="completed", prompt_tokens=prompt, completion_tokens=completion)


def counter(database: Database) -> Any:
    with database.read() as connection:
        return connection.execute(select(schema.quota_counters)).one()


def test_without_policies_every_request_is_admitted_without_limits(
    clocked: Database, make_request: MakeRequest
) -> None:
    assert Admission(clocked).reserve(make_request(most=10**9)).limits == ()


def test_tokens_are_reserved_then_settled_at_actual_usage(
    clocked: Database, acme: Tenant, make_request: MakeRequest
) -> None:
    QuotaPolicies(clocked).set(acme.id, "tokens_per_minute", 100)
    admission = Admission(clocked)
    first = admission.reserve(make_request(most=60))
    assert [(rate.kind, rate.limit, rate.remaining) for rate in first.limits] == [("tokens", 100, 40)]
    with pytest.raises(QuotaExceeded):
        admission.reserve(make_request(most=41))
    assert admission.settle(first.request_id, used(10, 5))
    assert (counter(clocked).level, counter(clocked).reserved) == (85 * UNITS, 0)
    second = admission.reserve(make_request(most=85))
    assert second.limits[0].remaining == 0


def test_retry_succeeds_after_the_reported_wait(
    clocked: Database, acme: Tenant, make_request: MakeRequest, clock: Any
) -> None:
    QuotaPolicies(clocked).set(acme.id, "tokens_per_minute", 60)
    admission = Admission(clocked)
    admission.settle(admission.reserve(make_request(most=60)).request_id, used(20, 40))
    with pytest.raises(QuotaExceeded) as caught:
        admission.reserve(make_request(most=30))
    assert caught.value.retry_after_s == 30
    assert caught.value.response_headers()["retry-after"] == "30"
    assert caught.value.headers["x-ratelimit-remaining-tokens"] == "0"
    clock.advance(29.999_999)
    with pytest.raises(QuotaExceeded):
        admission.reserve(make_request(most=30))
    clock.advance(0.000_001)
    admission.reserve(make_request(most=30))


def test_small_backward_clock_step_neither_refills_nor_drains(
    clocked: Database, acme: Tenant, make_request: MakeRequest, clock: Any
) -> None:
    QuotaPolicies(clocked).set(acme.id, "requests_per_minute", 1)
    admission = Admission(clocked)
    admission.reserve(make_request())
    for _ in range(3):
        clock.advance(-60)
        with pytest.raises(QuotaExceeded) as caught:
            admission.reserve(make_request())
        assert caught.value.retry_after_s == 120
        clock.advance(60)
        with pytest.raises(QuotaExceeded):
            admission.reserve(make_request())
    clock.advance(60)
    admission.reserve(make_request())


@pytest.mark.parametrize("metric", ["requests_per_minute", "tokens_per_minute"])
def test_rate_limit_survives_clock_jumps_forward_and_back(
    clocked: Database, acme: Tenant, make_request: MakeRequest, clock: Any, metric: str
) -> None:
    one, limit = (1, 4) if metric == "requests_per_minute" else (10, 40)
    QuotaPolicies(clocked).set(acme.id, metric, limit)
    admission = Admission(clocked)

    def admit_all() -> int:
        """Count the requests admitted before the first refusal, and check the refusal's retry time."""
        admitted, wait_s = 0, None
        while wait_s is None:
            try:
                request_id = admission.reserve(make_request(prompt=4, most=10)).request_id
            except QuotaExceeded as refused:
                wait_s = refused.retry_after_s
            else:
                admission.settle(request_id, used(4, 6))
                admitted += 1
        assert wait_s == 60 * one / limit
        return admitted

    assert admit_all() == 4
    for _ in range(3):
        clock.advance(7 * 86_400)
        assert admit_all() == 4, "a forward jump counts as elapsed time"
        clock.advance(-7 * 86_400)
        assert admit_all() == 0, "jumping back grants nothing"
    clock.advance(15)
    assert admit_all() == 1
    clock.advance(60)
    assert admit_all() == 4


def test_refill_from_a_clock_jump_is_undone(
    clocked: Database, acme: Tenant, make_request: MakeRequest, clock: Any
) -> None:
    QuotaPolicies(clocked).set(acme.id, "requests_per_minute", 6, burst=60)
    admission = Admission(clocked)
    for _ in range(50):
        admission.reserve(make_request())
    clock.advance(120)
    assert admission.reserve(make_request()).limits[0].remaining == 10 + 12 - 1
    clock.advance(-120)
    assert admission.reserve(make_request()).limits[0].remaining == 10 - 2
    clock.advance(60)
    assert admission.reserve(make_request()).limits[0].remaining == 10 - 3 + 6


def test_lease_from_before_a_backward_clock_jump_is_expired(
    clocked: Database, acme: Tenant, make_request: MakeRequest, clock: Any
) -> None:
    QuotaPolicies(clocked).set(acme.id, "concurrent_requests", 1)
    admission = Admission(clocked)
    clock.advance(7 * 86_400)
    admission.reserve(make_request())
    clock.advance(-7 * 86_400)
    with pytest.raises(QuotaExceeded):
        admission.reserve(make_request())
    assert admission.recover_expired() == 1
    alive = admission.reserve(make_request())
    clock.advance(-LEASE_US / 1_000_000)
    assert admission.recover_expired() == 0, "a small clock step ends no lease"
    assert admission.settle(alive.request_id, used(10, 5))


def test_checkpoint_renews_a_lease_after_a_backward_clock_jump(
    clocked: Database, make_request: MakeRequest, clock: Any
) -> None:
    admission = Admission(clocked)
    clock.advance(7 * 86_400)
    alive = admission.reserve(make_request())
    clock.advance(-7 * 86_400)
    admission.checkpoint([RequestCheckpoint(alive.request_id, 3)])
    assert admission.recover_expired() == 0
    clock.advance((LEASE_US + 1) / 1_000_000)
    assert admission.recover_expired() == 1


def test_any_minute_admits_at_most_the_limit_plus_the_burst(
    clocked: Database, acme: Tenant, make_request: MakeRequest, clock: Any
) -> None:
    QuotaPolicies(clocked).set(acme.id, "requests_per_minute", 6, burst=3)
    admission = Admission(clocked)
    admitted = 0
    for _ in range(60):
        try:
            admission.reserve(make_request())
            admitted += 1
        except QuotaExceeded:
            pass
        clock.advance(1)
    assert admitted == 6 + 3 - 1


def test_cost_above_the_burst_is_refused_as_too_large(
    clocked: Database, acme: Tenant, make_request: MakeRequest
) -> None:
    QuotaPolicies(clocked).set(acme.id, "tokens_per_minute", 100)
    with pytest.raises(RequestTooLarge) as caught:
        Admission(clocked).reserve(make_request(most=101))
    assert (caught.value.status, caught.value.code) == (400, "request_too_large")
    # The caller may not have set max_tokens.
    assert caught.value.message.endswith("set max_tokens to at most 90, or shorten the prompt")


@pytest.mark.parametrize("metric", LIMITING_ANY_REQUEST)
def test_zero_limit_refuses_without_a_retry_time(
    clocked: Database, acme: Tenant, make_request: MakeRequest, metric: str
) -> None:
    QuotaPolicies(clocked).set(acme.id, metric, 0)
    with pytest.raises(QuotaExceeded) as caught:
        Admission(clocked).reserve(make_request())
    assert (caught.value.status, caught.value.code) == (429, "insufficient_quota")


def test_concurrency_is_held_until_settled(clocked: Database, acme: Tenant, make_request: MakeRequest) -> None:
    QuotaPolicies(clocked).set(acme.id, "concurrent_requests", 1)
    admission = Admission(clocked)
    first = admission.reserve(make_request())
    assert first.limits == ()
    with pytest.raises(QuotaExceeded) as caught:
        admission.reserve(make_request())
    assert caught.value.param == "concurrent_requests"
    admission.settle(first.request_id, used(1, 1))
    admission.reserve(make_request())


def test_refused_request_charges_no_policy(clocked: Database, acme: Tenant, make_request: MakeRequest) -> None:
    policies, admission = QuotaPolicies(clocked), Admission(clocked)
    policies.set(acme.id, "requests_per_minute", 5)
    policies.set(acme.id, "concurrent_requests", 0)
    with pytest.raises(QuotaExceeded):
        admission.reserve(make_request())
    with clocked.read() as connection:
        levels = connection.execute(select(schema.quota_counters.c.level, schema.quota_counters.c.reserved)).all()
        assert sorted(tuple(row) for row in levels) == [(0, 0), (5 * UNITS, 0)]
        assert connection.execute(select(schema.reservations)).all() == []


def test_request_that_never_ran_is_refunded(clocked: Database, acme: Tenant, make_request: MakeRequest) -> None:
    QuotaPolicies(clocked).set(acme.id, "requests_per_minute", 5)
    admission = Admission(clocked)
    never = Settlement(status="failed", prompt_tokens=0, completion_tokens=0, has_run=False)
    admission.settle(admission.reserve(make_request()).request_id, never)
    assert counter(clocked).level == 5 * UNITS
    admission.settle(admission.reserve(make_request()).request_id, used(1, 0))
    assert counter(clocked).level == 4 * UNITS


def test_request_that_never_ran_gives_its_place_back(
    clocked: Database, acme: Tenant, make_request: MakeRequest
) -> None:
    QuotaPolicies(clocked).set(acme.id, "concurrent_requests", 1)
    admission = Admission(clocked)
    never = Settlement(status="failed", prompt_tokens=0, completion_tokens=0, has_run=False, has_begun=False)
    admission.settle(admission.reserve(make_request()).request_id, never)
    assert counter(clocked).reserved == 0
    admission.reserve(make_request())


def test_settling_twice_charges_once(clocked: Database, acme: Tenant, make_request: MakeRequest) -> None:
    QuotaPolicies(clocked).set(acme.id, "tokens_per_minute", 100)
    admission = Admission(clocked)
    reservation = admission.reserve(make_request())
    assert admission.settle(reservation.request_id, used(10, 5))
    assert not admission.settle(reservation.request_id, used(10, 20))
    assert counter(clocked).level == 85 * UNITS
    with clocked.read() as connection:
        event = connection.execute(select(schema.usage_events)).one()
    assert (event.prompt_tokens, event.completion_tokens, event.status) == (10, 5, "completed")
    with pytest.raises(LookupError):
        admission.settle("req_none", used(1, 1))


def test_tenant_with_running_or_past_requests_is_not_deleted(
    clocked: Database, acme: Tenant, acme_key: str, make_request: MakeRequest
) -> None:
    admission, tenants = Admission(clocked), Tenants(clocked)
    reservation = admission.reserve(make_request())
    assert ApiKeys(clocked).revoke(acme_key)
    with pytest.raises(Conflict) as caught:
        tenants.delete(acme.id)
    assert caught.value.code == "tenant_in_use"
    assert admission.settle(reservation.request_id, used(10, 5))
    with pytest.raises(Conflict) as caught:
        tenants.delete(acme.id)
    assert caught.value.code == "tenant_in_use"
    with clocked.write() as connection:
        connection.execute(delete(schema.usage_events))
    assert tenants.delete(acme.id)


def test_expired_reservation_is_recovered_then_corrected_once(
    clocked: Database, acme: Tenant, make_request: MakeRequest, clock: Any
) -> None:
    QuotaPolicies(clocked).set(acme.id, "tokens_per_minute", 100)
    admission = Admission(clocked)
    dead, alive = admission.reserve(make_request()), admission.reserve(make_request())
    clock.advance(LEASE_US / 1_000_000)
    assert admission.recover_expired() == 0
    admission.checkpoint([RequestCheckpoint(alive.request_id, 3)])
    clock.advance(0.000_001)
    # Imitate a dying gateway that recorded the tokens but did not extend the lease in time.
    assert admission.recover_expired() == 1
    assert admission.recover_expired() == 0
    assert counter(clocked).reserved == 30, "only the other request holds quota"
    level = counter(clocked).level
    # The gateway was only slow, and its own token counts are correct.
    assert admission.settle(dead.request_id, used(10, 20))
    assert counter(clocked).level == level - 20 * UNITS
    assert not admission.settle(dead.request_id, used(10, 30))
    assert counter(clocked).level == level - 20 * UNITS
    clock.advance(LEASE_US / 1_000_000)
    assert admission.recover_expired() == 1
    with clocked.read() as connection:
        events = connection.execute(select(schema.usage_events).order_by("request_id")).all()
        [adjustment] = connection.execute(select(schema.usage_adjustments)).all()
    assert (adjustment.request_id, adjustment.prompt_tokens, adjustment.completion_tokens) == (dead.request_id, 0, 20)
    assert {(event.request_id, event.status, event.completion_tokens) for event in events} == {
        (dead.request_id, "recovered", 0),
        (alive.request_id, "recovered", 3),
    }
    assert counter(clocked).reserved == 0
    admission.checkpoint([RequestCheckpoint(dead.request_id, 20)])
    assert admission.recover_expired() == 0


def test_deleting_a_policy_does_not_affect_running_requests(
    clocked: Database, acme: Tenant, make_request: MakeRequest
) -> None:
    policies, admission = QuotaPolicies(clocked), Admission(clocked)
    policy = policies.set(acme.id, "tokens_per_minute", 100)
    reservation = admission.reserve(make_request())
    assert policies.delete(policy.id)
    assert not policies.delete(policy.id)
    assert admission.settle(reservation.request_id, used(10, 5))
    policies.set(acme.id, "tokens_per_minute", 50)
    assert counter(clocked).level == 50 * UNITS


def test_changed_limit_keeps_reserved_and_refilled_amounts(
    clocked: Database, acme: Tenant, make_request: MakeRequest, clock: Any
) -> None:
    policies, admission = QuotaPolicies(clocked), Admission(clocked)
    policy = policies.set(acme.id, "tokens_per_minute", 60)
    admission.settle(admission.reserve(make_request(most=60)).request_id, used(60, 0))
    clock.advance(10)
    changed = policies.set(acme.id, "tokens_per_minute", 120)
    assert changed == replace(policy, limit=120, burst=120, updated_us=clock.now_us)
    assert policies.get(policy.id) == changed
    clock.advance(10)
    assert admission.reserve(make_request(most=30)).limits[0].remaining == 0
    policies.set(acme.id, "tokens_per_minute", 5)
    assert (counter(clocked).level, counter(clocked).reserved) == (5 * UNITS, 30)
    assert policies.list(acme.id, limit=10).data == policies.list(None, limit=10).data


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        pytest.param(("money_per_day", 1), "metric", id="unknown metric"),
        pytest.param(("tokens_per_minute", -1), "limit", id="negative"),
        pytest.param(("tokens_per_minute", MAX_RATE + 1), "limit", id="overflow"),
        pytest.param(("tokens_per_month", MAX_AMOUNT + 1), "limit", id="budget overflow"),
        pytest.param(("tokens_per_minute", 1, -1), "burst", id="negative burst"),
        pytest.param(("tokens_per_minute", 1, MAX_RATE + 1), "burst", id="burst overflow"),
        pytest.param(("tokens_per_minute", 1, 0), "burst", id="no burst"),
        pytest.param(("concurrent_requests", 1, 1), "burst", id="concurrency burst"),
        pytest.param(("tokens_per_day", 10, 10), "burst", id="budget burst"),
        pytest.param(("tokens_per_day", 10, None, "strict"), "mode", id="unknown mode"),
    ],
)
def test_invalid_policy_error_names_the_field(clocked: Database, acme: Tenant, arguments: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        QuotaPolicies(clocked).set(acme.id, *arguments)
    assert caught.value.param == param


def test_the_largest_limit_fits_the_columns(clocked: Database, acme: Tenant, make_request: MakeRequest) -> None:
    QuotaPolicies(clocked).set(acme.id, "tokens_per_minute", MAX_RATE)
    admission = Admission(clocked)
    admission.settle(admission.reserve(make_request(most=MAX_RATE)).request_id, used(MAX_RATE, 0))
    assert counter(clocked).level == 0


def test_a_policy_of_an_unknown_tenant_is_refused(clocked: Database) -> None:
    with pytest.raises(NotFound):
        QuotaPolicies(clocked).set("ten_none", "tokens_per_minute", 1)


def test_racing_clients_never_overspend(clocked: Database, acme: Tenant, make_request: MakeRequest) -> None:
    QuotaPolicies(clocked).set(acme.id, "tokens_per_minute", 100)
    admission = Admission(clocked)

    def attempt(_: int) -> bool:
        try:
            reservation = admission.reserve(make_request(most=30))
        except QuotaExceeded:
            return False
        return admission.settle(reservation.request_id, used(10, 20))

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(attempt, range(24))) == 3
    assert (counter(clocked).level, counter(clocked).reserved) == (10 * UNITS, 0)


def test_policies_change_while_requests_run_without_deadlock(
    clocked: Database, acme: Tenant, make_request: MakeRequest
) -> None:
    policies, admission = QuotaPolicies(clocked), Admission(clocked)
    metrics = LIMITING_ANY_REQUEST[:2]

    def change(i: int) -> None:
        policies.set(acme.id, metrics[i % 2], 10**6 + i)

    def run(_: int) -> None:
        admission.settle(admission.reserve(make_request()).request_id, used(1, 1))

    with ThreadPoolExecutor(6) as threads:
        for future in [threads.submit(work, i) for i in range(20) for work in (change, run, run)]:
            future.result(timeout=30)
    assert Tenants(clocked).get("acme") == acme


def test_running_request_can_extend_its_reservation(clocked: Database, acme: Tenant, make_request: MakeRequest) -> None:
    for metric, limit in (("tokens_per_minute", 100), ("requests_per_minute", 5), ("concurrent_requests", 5)):
        QuotaPolicies(clocked).set(acme.id, metric, limit)
    admission = Admission(clocked)
    first, second = admission.reserve(make_request(most=30)), admission.reserve(make_request(most=30))
    assert admission.extend(first.request_id, 25)
    assert not admission.extend(second.request_id, 16), "15 tokens are left"
    assert admission.extend(second.request_id, 15)
    with clocked.read() as connection:
        rows = connection.execute(select(schema.reservations.c.id, schema.reservations.c.reserved_tokens)).all()
        assert {row.id: row.reserved_tokens for row in rows} == {first.request_id: 55, second.request_id: 45}
    assert admission.settle(first.request_id, used(10, 40))
    assert admission.settle(second.request_id, used(10, 1))
    assert not admission.extend(first.request_id, 1), "settled"
    with pytest.raises(LookupError):
        admission.extend("req_none", 1)
    with clocked.read() as connection:
        query = select(schema.quota_policies.c.metric, schema.quota_counters.c.level, schema.quota_counters.c.reserved)
        counters = connection.execute(query.join(schema.quota_counters)).all()
    left = {metric: (level // UNITS, reserved) for metric, level, reserved in counters}
    assert left == {"tokens_per_minute": (39, 0), "requests_per_minute": (3, 0), "concurrent_requests": (5, 0)}


def test_extension_and_settlement_in_one_transaction_release_everything(
    clocked: Database, acme: Tenant, make_request: MakeRequest
) -> None:
    QuotaPolicies(clocked).set(acme.id, "tokens_per_minute", 100)
    admission = Admission(clocked)
    request_id = admission.reserve(make_request(most=30)).request_id
    outcomes = admission.commit(
        [
            Extension(request_id=request_id, tokens=40),
            Extension(request_id=request_id, tokens=31),
            Closing(request_id=request_id, settlement=used(10, 50)),
            Extension(request_id=request_id, tokens=1),
        ]
    )
    assert outcomes == [True, False, True, False]
    assert (counter(clocked).level, counter(clocked).reserved) == (40 * UNITS, 0)


def test_request_waiting_for_a_counter_obeys_a_changed_limit(
    clocked: Database, acme: Tenant, make_request: MakeRequest
) -> None:
    QuotaPolicies(clocked).set(acme.id, "tokens_per_minute", 100)
    admission = Admission(clocked)
    # This call caches the rule.
    admission.settle(admission.reserve(make_request()).request_id, used(10, 0))
    policies, counters = schema.quota_policies, schema.quota_counters
    with ThreadPoolExecutor(1) as other:
        with clocked.write() as connection:
            connection.execute(counters.update().values(level=20 * UNITS))
            waiting = other.submit(admission.reserve, make_request(most=30))
            assert not futures_wait([waiting], timeout=0.2).done
            connection.execute(policies.update().values(limit_value=20, burst=20))
        with pytest.raises(RequestTooLarge):
            waiting.result()
    assert counter(clocked).reserved == 0


def test_sweep_deletes_only_old_counters_without_reservations(
    clocked: Database, acme: Tenant, make_request: MakeRequest, clock: Any
) -> None:
    for metric in ("tokens_per_minute", "tokens_per_day"):
        QuotaPolicies(clocked).set(acme.id, metric, 100)
    admission = Admission(clocked)

    def windows() -> list[tuple[int, int]]:
        columns = schema.quota_counters.c
        with clocked.read() as connection:
            query = select(columns.window_start_us, columns.reserved).order_by(columns.window_start_us)
            return [(row[0], row[1]) for row in connection.execute(query)]

    admission.settle(admission.reserve(make_request()).request_id, used(10, 5))
    clock.advance(86_400)
    admission.reserve(make_request(most=40))
    clock.advance(98 * 86_400)
    assert admission.sweep_counters() == 0
    clock.advance(2 * 86_400)
    admission.settle(admission.reserve(make_request()).request_id, used(10, 5))
    assert len(windows()) == 4
    assert admission.sweep_counters() == 1
    bucket, held, current = windows()
    assert (bucket[0], held[1], current[1]) == (0, 40, 0)
    assert admission.sweep_counters() == 0


@pytest.mark.parametrize(
    ("metric", "second", "counted"),
    [("tokens_per_day", 60, 1), ("tokens_per_minute", 60, 1), ("tokens_per_day", 40, 0)],
)
def test_late_settlement_over_a_hard_limit_is_counted(
    clocked: Database, acme: Tenant, make_request: MakeRequest, clock: Any, metric: str, second: int, counted: int
) -> None:
    QuotaPolicies(clocked).set(acme.id, metric, 100)
    noted: list[int] = []
    admission = Admission(clocked, noted.append)
    late = admission.reserve(make_request(prompt=10, most=60)).request_id
    clock.advance((LEASE_US + 1) / 1_000_000)
    assert admission.recover_expired() == 1
    # Meanwhile, other requests have reserved the quota that recovery released.
    admission.reserve(make_request(prompt=10, most=second))
    assert admission.settle(late, used(10, 50))
    assert noted == [1] * counted


def test_request_that_cannot_be_recovered_holds_up_no_other(
    clocked: Database, make_request: MakeRequest, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_module, "_RECOVER_AT_ONCE", 2)
    admission = Admission(clocked)
    made = sorted(admission.reserve(make_request()).request_id for _ in range(6))
    bad = {made[0], made[1], made[4]}
    apply = AdmissionTransaction.apply

    def fail(self: AdmissionTransaction, operations: Sequence[Operation]) -> list[Outcome]:
        if any(one.request_id in bad for one in operations):
            raise KeyError("Mars/Olympus")
        return apply(self, operations)

    monkeypatch.setattr(AdmissionTransaction, "apply", fail)
    clock.advance((LEASE_US + 1) / 1_000_000)
    assert [admission.recover_expired() for _ in range(4)] == [0, 2, 1, 0]
    bad.clear()
    assert sum(admission.recover_expired() for _ in range(3)) == 3
