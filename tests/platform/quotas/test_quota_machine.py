"""Admission on each database, compared with plain dictionaries after every step of a property-based state machine.

Requests are reserved, extended, checkpointed, settled twice, recovered and settled late. Limits of every scope and mode
are set, changed and deleted. Clocks jump forwards and backwards across windows in time zones with daylight saving.
Transactions die at any of their statements, or at the commit.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import event, func, select

from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenants
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import RequestCheckpoint, ReservationRequest
from loramux.platform.errors import InvalidRequest
from loramux.platform.ledger.price_list import PriceList
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.quotas.decisions import QuotaExceeded, RequestTooLarge
from loramux.platform.quotas.policies import QuotaPolicies
from tests.platform.clocked_databases import FakeClock, empty
from tests.platform.quotas.quota_oracle import (
    BATCH_PERCENT,
    CACHED,
    COMPLETION,
    LEASE_US,
    PROMPT,
    Policy,
    QuotaOracle,
    Request,
    cost,
)

NUM_STEPS = int(os.environ.get("LORAMUX_QUOTA_STEPS", "1500"))
"""Number of campaign steps on each database."""

ZONES = ("Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe")
PRICED_AHEAD_US = 30 * 86_400_000_000
STARTS = (
    # An hour before clocks change in Berlin, in spring and in autumn, and before a year ends.
    datetime(2026, 3, 29, 0, 0, tzinfo=UTC),
    datetime(2026, 10, 24, 23, 0, tzinfo=UTC),
    datetime(2026, 12, 31, 22, 0, tzinfo=UTC),
)
LIMITS = {
    "requests_per_minute": 4,
    "tokens_per_minute": 60,
    "concurrent_requests": 3,
    "tokens_per_day": 150,
    "batch_tokens_per_day": 90,
    "tokens_per_month": 250,
    "cost_per_day": cost(60, 0, 90),
    "cost_per_month": cost(90, 0, 160),
}
LIMIT = {
    "who": st.sampled_from(["platform", "tenant", "tenant", "key", "adapter"]),
    "which": st.integers(0, 1),
    "metric": st.sampled_from(sorted(LIMITS)),
    "part": st.sampled_from([2, 1, 4, 0]),
    "has_burst": st.booleans(),
    "mode": st.sampled_from(["hard", "hard", "hard", "soft", "shadow"]),
}
SECONDS = st.sampled_from([0.000_001, 0.7, 5, 20, 31, 61, 1800, 3600, 26 * 3600, -0.5, -40, -3600])
JUMPS = st.sampled_from([40, 60.000_001, 90, 7200, 8 * 86_400])


class Crash(Exception):
    """Simulates the death of a gateway."""


@contextmanager
def crash_at(database: Database, statement: int) -> Iterator[None]:
    """Die before this statement of the next transaction, or at its commit if it has fewer statements."""
    num_seen = 0

    def before_statement(*_: Any) -> None:
        nonlocal num_seen
        num_seen += 1
        if num_seen > statement:
            raise Crash

    def before_commit(*_: Any) -> None:
        raise Crash

    def execute(driver: Any, statement: str, *parameters: Any) -> Any:
        before_statement()
        if statement == "COMMIT":
            before_commit()
        return run(driver, statement, *parameters)

    engine = database._engine
    event.listen(engine, "before_cursor_execute", before_statement)
    event.listen(engine, "commit", before_commit)
    run = psycopg.Connection.execute
    with pytest.MonkeyPatch.context() as patch:
        # Pipelined statements to PostgreSQL can be intercepted only here.
        patch.setattr(psycopg.Connection, "execute", execute)
        patch.setattr(psycopg.Connection, "commit", before_commit)
        try:
            with pytest.raises(Crash):
                yield
        finally:
            event.remove(engine, "before_cursor_execute", before_statement)
            event.remove(engine, "commit", before_commit)


class QuotaMachine(RuleBasedStateMachine):
    database: Database
    clock: FakeClock

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(self.database)
        self.policies = QuotaPolicies(self.database)
        self.ahead_s = 0.0

    @initialize(
        start=st.sampled_from(STARTS),
        zones=st.permutations(ZONES),
        limits=st.lists(st.fixed_dictionaries(LIMIT), min_size=4, max_size=9),
    )
    def begin(self, start: datetime, zones: list[str], limits: list[dict[str, Any]]) -> None:
        # Prices start early enough that every time reached by a backward jump has a price.
        self.clock.now_us = int(start.timestamp()) * 1_000_000 - PRICED_AHEAD_US
        tenants, keys = Tenants(self.database), ApiKeys(self.database)
        self.tenants = [tenants.create(f"tenant-{i}", timezone=zone).id for i, zone in enumerate(zones[:2])]
        self.keys = {tenant: keys.create(tenant, "key").key.id for tenant in self.tenants}
        self.adapters = {tenant: self._adapter(tenant) for tenant in self.tenants}
        PriceList(self.database).add(
            tenant_id=None,
            scope="all",
            prompt_nanos=PROMPT,
            cached_nanos=CACHED,
            completion_nanos=COMPLETION,
            batch_percent=BATCH_PERCENT,
        )
        self.clock.now_us += PRICED_AHEAD_US
        owners = {self.keys[tenant]: tenant for tenant in self.tenants}
        owners.update((self.adapters[tenant], tenant) for tenant in self.tenants)
        self.oracle = QuotaOracle(dict(zip(self.tenants, zones, strict=False)), owners)
        for limit in limits:
            self._set(**limit)

    def _adapter(self, tenant: str) -> str:
        adapter_id = new_id("ada")
        with self.database.write() as connection:
            values = {"id": adapter_id, "tenant_id": tenant, "name": "adapter", "created_us": 0}
            connection.execute(schema.adapters.insert().values(**values))
        return adapter_id

    def _try(self, crash: int | None, work: Callable[[], Any]) -> Any:
        """Run some work and return its outcome. With `crash`, a gateway first starts the same work and dies."""
        if crash is not None:
            with crash_at(self.database, crash):
                work()
            self.agrees()
        return work()

    @rule(limit=st.fixed_dictionaries(LIMIT))
    def set_policy(self, limit: dict[str, Any]) -> None:
        self._set(**limit)

    def _set(self, who: str, which: int, metric: str, part: int, has_burst: bool, mode: str) -> None:
        tenant = self.tenants[which]
        subject = {
            "platform": "platform",
            "tenant": tenant,
            "key": self.keys[tenant],
            "adapter": self.adapters[tenant],
        }[who]
        limit = LIMITS[metric] * part // 2
        burst = limit + 5 if has_burst and limit and metric.endswith("_per_minute") else None
        if self._contradicts(subject, metric, limit, mode):
            with pytest.raises(InvalidRequest, match="could never be reached"):
                self.policies.set(subject, metric, limit, burst, mode)
            return
        made = self.policies.set(subject, metric, limit, burst, mode)
        policy = Policy(made.id, subject, metric, limit, limit if burst is None else burst, mode)
        self.oracle.set_policy(policy, self.clock.now_us)

    def _contradicts(self, subject: str, metric: str, limit: int, mode: str) -> bool:
        day, month = metric.replace("month", "day"), metric.replace("day", "month")
        other = self.oracle.policies.get((subject, month if metric == day else day))
        if not metric.endswith(("day", "month")) or other is None or not mode == other.mode == "hard":
            return False
        return limit > other.limit if metric == day else limit < other.limit

    @precondition(lambda self: self.oracle.policies)
    @rule(data=st.data())
    def delete_policy(self, data: st.DataObject) -> None:
        # Keep the order that policies were set in, because identifiers differ between runs.
        subject, metric = data.draw(st.sampled_from(list(self.oracle.policies)))
        assert self.policies.delete(self.oracle.policies[subject, metric].id)
        self.oracle.delete_policy(subject, metric)

    @rule(
        asked=st.lists(
            st.tuples(
                st.integers(0, 1),
                st.sampled_from([None, 0, 1]),
                st.integers(1, 40),
                st.integers(1, 60),
                st.booleans(),
            ),
            min_size=1,
            max_size=5,
        ),
        crash=st.sampled_from([None, None, 0, 2, 4, 6, 8, 10, 12]),
    )
    def reserve(self, asked: list[tuple[int, int | None, int, int, bool]], crash: int | None) -> None:
        for which, whose, prompt, completion, is_batch in asked:
            self._reserve(which, whose, prompt, completion, is_batch, crash)
            crash = None

    def _reserve(
        self, which: int, whose: int | None, prompt: int, completion: int, is_batch: bool, crash: int | None
    ) -> None:
        tenant = self.tenants[which]
        adapter = None if whose is None else self.adapters[self.tenants[whose]]
        request = Request(new_id("req"), tenant, prompt, completion, self.clock.now_us + LEASE_US, is_batch)
        wanted = ReservationRequest(
            request_id=request.id,
            tenant_id=tenant,
            api_key_id=self.keys[tenant],
            model="model",
            adapter_version_id=None,
            adapter_id=adapter,
            endpoint="batches" if is_batch else "completions",
            prompt_tokens=prompt,
            reserved_tokens=prompt + completion,
        )
        bound = self.oracle.binding(tenant, self.keys[tenant], adapter, self.clock.now_us, is_batch)
        against = {
            policy.id: policy
            for policy, count in bound
            if policy.mode == "hard"
            and not self.oracle.fits(
                policy, count, self.oracle.price(policy, prompt, completion, is_batch), self.clock.now_us
            )
        }
        too_large = [
            policy.id
            for policy in against.values()
            if policy.metric != "concurrent_requests"
            and policy.limit > 0
            and self.oracle.price(policy, prompt, completion, is_batch) > policy.burst
        ]
        if too_large:
            with pytest.raises(RequestTooLarge) as large:
                self._try(crash, lambda: self.admission.reserve(wanted))
            assert large.value.policy.id in too_large
            self.oracle.refuse(bound, self.clock.now_us)
        elif against:
            with pytest.raises(QuotaExceeded) as refused:
                self._try(crash, lambda: self.admission.reserve(wanted))
            assert refused.value.policy.id in against
            assert refused.value.wait_us > 0
            self.oracle.refuse(bound, self.clock.now_us)
        else:
            reservation = self._try(crash, lambda: self.admission.reserve(wanted))
            beyond = self.oracle.admit(request, bound, self.clock.now_us)
            assert {policy.id for policy in reservation.exceeded} == beyond

    def _draw(self, data: st.DataObject, *states: str) -> Request:
        return data.draw(st.sampled_from([one for one in self.oracle.requests.values() if one.state in states]))

    @precondition(lambda self: any(request.state == "open" for request in self.oracle.requests.values()))
    @rule(data=st.data(), tokens=st.integers(1, 50), crash=st.sampled_from([None, None, 1, 3, 5, 7]))
    def extend(self, data: st.DataObject, tokens: int, crash: int | None) -> None:
        request = self._draw(data, "open")
        granted = self._try(crash, lambda: self.admission.extend(request.id, tokens))
        assert granted == self.oracle.extend(request, tokens, self.clock.now_us)

    @precondition(lambda self: any(request.state != "settled" for request in self.oracle.requests.values()))
    @rule(
        data=st.data(),
        part=st.floats(0, 1),
        has_run=st.sampled_from([True, True, True, False]),
        crash=st.sampled_from([None, None, 0, 2, 4, 6, 8, 10]),
    )
    def settle(self, data: st.DataObject, part: float, has_run: bool, crash: int | None) -> None:
        request = self._draw(data, "open", "recovered")
        prompt = request.prompt if has_run else 0
        cached, completion = int(prompt * part), int(request.completion * part) if has_run else 0
        truth = Settlement(
            status="completed",
            prompt_tokens=prompt,
            completion_tokens=completion,
            cached_tokens=cached,
            has_run=has_run,
        )
        assert self._try(crash, lambda: self.admission.settle(request.id, truth)) is True
        self.oracle.close(request, "settled", (prompt, cached, completion), has_run, self.clock.now_us)

    @precondition(lambda self: any(request.state == "settled" for request in self.oracle.requests.values()))
    @rule(data=st.data(), completion=st.integers(0, 99))
    def settle_again(self, data: st.DataObject, completion: int) -> None:
        request = self._draw(data, "settled")
        again = Settlement(status="completed", prompt_tokens=request.prompt, completion_tokens=completion)
        assert self.admission.settle(request.id, again) is False
        assert self.admission.extend(request.id, 1) is False

    @precondition(lambda self: self.oracle.requests)
    @rule(data=st.data(), part=st.floats(0, 1))
    def checkpoint(self, data: st.DataObject, part: float) -> None:
        request = self._draw(data, "open", "recovered", "settled")
        tokens = int(request.completion * part)
        self.admission.checkpoint([RequestCheckpoint(request.id, tokens)])
        if request.state == "open":
            # A checkpoint never falls, because several sources report the delivered tokens.
            request.checkpoint = max(request.checkpoint, tokens)
            request.lease_us = self.clock.now_us + LEASE_US

    @rule(crash=st.sampled_from([None, None, 2, 5, 9]))
    def recover(self, crash: int | None) -> None:
        expired = self.oracle.expired(self.clock.now_us)
        num_recovered = self._try(crash if expired else None, self.admission.recover_expired)
        assert num_recovered == len(expired)
        for request in expired:
            charged = (request.prompt, 0, request.checkpoint)
            self.oracle.close(request, "recovered", charged, True, self.clock.now_us)

    @rule(seconds=SECONDS)
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @precondition(lambda self: not self.ahead_s)
    @rule(seconds=JUMPS)
    def jump_ahead(self, seconds: float) -> None:
        """Let the clock be wrong until `jump_back`."""
        self.ahead_s = seconds
        self.clock.advance(seconds)

    @precondition(lambda self: self.ahead_s)
    @rule()
    def jump_back(self) -> None:
        self.clock.advance(-self.ahead_s)
        self.ahead_s = 0.0

    @rule(which=st.integers(0, 1), offset_us=st.sampled_from([-1, 0, 1]))
    def come_to_midnight(self, which: int, offset_us: int) -> None:
        """Move to the end of a tenant's day, in half-hour steps until the local date changes."""
        zone = self.oracle.zones[self.tenants[which]]
        moment = datetime.fromtimestamp(self.clock.now_us // 1_000_000, UTC).replace(minute=0, second=0)
        today = datetime.fromtimestamp(self.clock.now_us // 1_000_000, UTC).astimezone(zone).date()
        while moment.astimezone(zone).date() <= today:
            moment += timedelta(minutes=30)
        self.clock.now_us = int(moment.timestamp()) * 1_000_000 + offset_us

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "oracle"):
            return
        self._counters_agree()
        self._ledger_agrees()
        self._no_hard_limit_is_passed()

    def _counters_agree(self) -> None:
        by_id = {policy.id: policy for policy in self.oracle.policies.values()}
        with self.database.read() as connection:
            rows = connection.execute(select(schema.quota_counters)).all()
        found = {}
        for row in rows:
            policy = by_id[row.policy_id]
            count = (policy.id, row.subject_id, ())
            if row.window_start_us:
                count = (policy.id, row.subject_id, self.oracle.window(policy, row.subject_id, row.window_start_us))
                assert self.oracle.window(policy, row.subject_id, row.window_start_us - 1) != count[2]
            assert count not in found, "two windows for one date"
            found[count] = row
            assert row.reserved == self.oracle.reserved(count)
            assert row.used == self.oracle.used(policy, count)
            assert row.exceeded == self.oracle.exceeded.get(count, 0)
            bucket = self.oracle.buckets.get(count)
            if policy.is_rate and bucket is not None:
                assert (row.level, row.refilled_us) == (bucket.level, bucket.at_us)
        for request in self.oracle.requests.values():
            assert {count for _, count in self.oracle.holding(request)} <= found.keys()

    def _ledger_agrees(self) -> None:
        requests = self.oracle.requests.values()
        charged = [(request.charged, request.is_batch) for request in requests]
        with self.database.read() as connection:
            sums = []
            for table in (schema.usage_events, schema.usage_adjustments):
                names = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_nanos")
                columns = [func.coalesce(func.sum(table.c[name]), 0) for name in names]
                sums.append([int(value) for value in connection.execute(select(func.count(), *columns)).one()])
            table = schema.reservations
            held = {row.id: row.state for row in connection.execute(select(table.c.id, table.c.state))}
        assert held == {one.id: one.state for one in requests if one.state != "settled"}
        assert sums[0][0] == sum(request.state != "open" for request in requests)
        total = [a + b for a, b in zip(sums[0][1:], sums[1][1:], strict=True)]
        assert total == [
            *(sum(part) for part in zip((0, 0, 0), *(tokens for tokens, _ in charged), strict=True)),
            sum(cost(*tokens, is_batch) for tokens, is_batch in charged),
        ]

    def _no_hard_limit_is_passed(self) -> None:
        """Only late settlements, and usage from before the limit was set, may exceed a hard limit."""
        for request in self.oracle.requests.values():
            for policy, count in self.oracle.holding(request):
                if policy.mode == "hard" and not policy.has_changed and not policy.is_rate:
                    held = self.oracle.used(policy, count) + self.oracle.reserved(count)
                    assert held <= policy.limit + self.oracle.late(policy, count)

    def teardown(self) -> None:
        empty(self.database)


def run(database: Database, clock: FakeClock, num_steps: int, steps_each: int, is_shrinking: bool = False) -> None:
    shape = settings(
        max_examples=max(1, num_steps // steps_each),
        stateful_step_count=steps_each,
        deadline=None,
        database=None,
        # `make test` runs the same steps each time. Only the campaign draws new ones.
        derandomize=not is_shrinking,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
        # A short run only shows that something is wrong. The campaign shrinks the example, which takes minutes.
        phases=tuple(Phase) if is_shrinking else (Phase.generate,),
    )
    machine = type("QuotaMachineHere", (QuotaMachine,), {"database": database, "clock": clock})
    run_state_machine_as_test(machine, settings=shape)


def test_admission_agrees_with_plain_dictionaries(clocked: Database, clock: FakeClock) -> None:
    run(clocked, clock, 180, 30)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_admission_agrees_with_plain_dictionaries_in_a_campaign(clocked: Database, clock: FakeClock) -> None:
    run(clocked, clock, NUM_STEPS, 60, is_shrinking=True)
