from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from sqlalchemy import Connection, event, insert, select, update
from structlog.testing import capture_logs

from loramux.adapter_store.registry import aliases
from loramux.adapter_store.registry.aliases import NOT_ROLLED_BACK, AdapterAliases
from loramux.adapter_store.registry.records import Alias, CanaryRule, WatchedAlias
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.sharing import AdapterGrants
from loramux.adapter_store.registry.version_states import VersionStates
from loramux.migrations.database import Database
from loramux.migrations.schema import adapter_aliases, events, usage_events
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenant, Tenants
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import ReservationRequest
from loramux.platform.evals import canaries as canaries_module
from loramux.platform.evals.canaries import Canaries, judge
from loramux.platform.ledger.outcomes import MAX_READ, Outcomes
from loramux.platform.ledger.prices import BATCHES
from loramux.platform.ledger.settlement import MODEL_FAILED, Settlement
from loramux.platform.telemetry.metrics import GatewayMetrics
from tests.platform.clocked_databases import FakeClock
from tests.platform.ready_adapters import add_ready_adapter, digest_of

RULE = CanaryRule(max_error_rate=0.1, max_first_token_s=2.0, min_requests=10)
TENTH = {1: 90, 2: 10}


class Watched:
    """The alias `default` of acme/support, which gives version 2 a tenth of the requests."""

    def __init__(self, database: Database, clock: FakeClock, acme: Tenant) -> None:
        self.database, self._clock = database, clock
        self.metrics = GatewayMetrics()
        digests = [digest_of(name) for name in ("one", "two", "three")]
        self.adapter_id = add_ready_adapter(database, acme.id, "support", digests)
        self.aliases = AdapterAliases(database)
        self.aliases.set(self.adapter_id, "default", {1: 100})
        self._admission = Admission(database)
        self._num_requests = 0

    def move(self, rule: CanaryRule | None = RULE, shares: Mapping[int, int] = TENTH) -> Alias:
        self._clock.advance(1)
        return self.aliases.set(self.adapter_id, "default", shares, canary=rule)

    def serve(self, tenant: Tenant, count: int, status: str = "completed", wait_s: float = 0.5, **fields: str) -> None:
        key_id = ApiKeys(self.database).create(tenant.id, "test").key.id
        for _ in range(count):
            self._num_requests += 1
            request_id = f"req_{self._num_requests:032x}"
            wanted = {"model": "acme/support@2", "endpoint": "chat", **fields}
            self._admission.reserve(
                ReservationRequest(
                    request_id=request_id,
                    tenant_id=tenant.id,
                    api_key_id=key_id,
                    adapter_version_id=None,
                    prompt_tokens=1,
                    reserved_tokens=2,
                    **wanted,
                )
            )
            first_us = self._clock.now_us + round(wait_s * 1_000_000)
            self._clock.advance(wait_s + 0.001)
            settled = Settlement(status=status, prompt_tokens=1, completion_tokens=1, first_token_us=first_us)
            self._admission.settle(request_id, settled)

    def repeat_last(self, count: int, **fields: str) -> None:
        """Add copies of the last request to the ledger with these fields, much faster than `serve`."""
        with self.database.write() as connection:
            last = (
                connection.execute(select(usage_events).order_by(usage_events.c.finished_us.desc())).mappings().first()
            )
            assert last is not None
            copies = [
                {
                    **last,
                    **fields,
                    "request_id": f"req_{self._num_requests + number:032x}",
                    "finished_us": last["finished_us"] + number,
                }
                for number in range(1, count + 1)
            ]
            connection.execute(insert(usage_events), copies)
        self._num_requests += count

    def check(self) -> Alias:
        registry = AdapterRegistry(self.database)
        Canaries(self.database, registry, self.aliases, self.metrics.evals).check()
        return self.aliases.get(self.adapter_id, "default")

    def failures(self) -> list[Any]:
        """The data of the events of failed canaries."""
        with self.database.read() as connection:
            return list(connection.scalars(select(events.c.data).where(events.c.type == "canary.failed")))

    @property
    def num_rollbacks(self) -> float:
        return self.metrics.registry.get_sample_value("loramux_canary_rollbacks_total") or 0.0


@pytest.fixture
def watched(clocked: Database, clock: FakeClock, acme: Tenant) -> Watched:
    return Watched(clocked, clock, acme)


def shares(alias: Alias) -> dict[int, int]:
    return {target.number: target.weight for target in alias.targets}


def test_failing_version_is_taken_back(watched: Watched, acme: Tenant) -> None:
    watched.serve(acme, 5, MODEL_FAILED)
    watched.move()
    assert shares(watched.check()) == {1: 90, 2: 10}, "earlier requests do not count"
    watched.serve(acme, 3)
    watched.serve(acme, 1, MODEL_FAILED)
    assert shares(watched.check()) == {1: 90, 2: 10}, "one failure in the first ten is allowed"
    watched.serve(acme, 1, MODEL_FAILED)
    alias = watched.check()
    assert shares(alias) == {1: 100}
    assert alias.canary is not None
    assert alias.canary.verdict == "version 2: 2 of 5 requests failed"
    change = watched.aliases.history(watched.adapter_id, "default", 1).data[0]
    assert (change.actor, change.action) == ("system", "rollback")
    assert watched.check() == alias
    assert watched.num_rollbacks == 1


def test_failing_version_is_taken_back_after_a_change_of_the_bounds(watched: Watched, acme: Tenant) -> None:
    watched.move()
    watched.move(CanaryRule(max_error_rate=0.2, min_requests=10))
    watched.serve(acme, 3, MODEL_FAILED)
    alias = watched.check()
    assert shares(alias) == {1: 100}
    assert alias.canary is not None
    assert alias.canary.verdict == "version 2: 3 of 3 requests failed"


def test_slow_version_is_taken_back(watched: Watched, acme: Tenant) -> None:
    watched.move()
    watched.serve(acme, 9, wait_s=2.5)
    assert shares(watched.check()) == {1: 90, 2: 10}, "too few requests to tell"
    watched.serve(acme, 1, wait_s=2.5)
    alias = watched.check()
    assert shares(alias) == {1: 100}
    assert alias.canary is not None
    assert alias.canary.verdict == "version 2: the 95th percentile of the time to the first token is 2.5 s"


def test_one_slow_request_of_twenty_is_not_the_95th_percentile() -> None:
    assert Outcomes(20, 0, (0.2,) * 19 + (2.0,)).first_token_p95_s == 0.2
    assert Outcomes(20, 0, (0.2,) * 18 + (2.0,) * 2).first_token_p95_s == 2.0
    assert Outcomes(40, 0, (0.2,) * 38 + (2.0,) * 2).first_token_p95_s == 0.2
    assert Outcomes(1, 0, (0.2,)).first_token_p95_s == 0.2


def test_requests_of_the_last_tier_can_be_slow_but_must_not_fail(watched: Watched, acme: Tenant) -> None:
    watched.move()
    watched.serve(acme, 10)
    watched.serve(acme, 10, wait_s=60.0, service_tier="flex")
    assert shares(watched.check()) == {1: 90, 2: 10}
    watched.serve(acme, 3, MODEL_FAILED, service_tier="flex")
    assert shares(watched.check()) == {1: 100}


def test_good_version_and_other_requests_stay(watched: Watched, acme: Tenant) -> None:
    watched.move()
    watched.serve(acme, 20)
    watched.serve(acme, 5, "aborted")
    watched.serve(acme, 20, MODEL_FAILED, model="acme/support@1")
    watched.serve(acme, 20, MODEL_FAILED, endpoint="evals")
    watched.serve(Tenants(watched.database).create("other"), 20, MODEL_FAILED)
    alias = watched.check()
    assert (shares(alias), alias.canary and alias.canary.verdict) == ({1: 90, 2: 10}, None)
    assert watched.num_rollbacks == 0


def test_requests_of_tenants_with_a_grant_count(watched: Watched, acme: Tenant) -> None:
    other = Tenants(watched.database).create("other")
    adapter = AdapterRegistry(watched.database).get_adapter(watched.adapter_id)
    assert adapter is not None
    AdapterGrants(watched.database).add(adapter, other.id)
    watched.move()
    watched.serve(other, 2, MODEL_FAILED)
    assert shares(watched.check()) == {1: 100}


def test_other_traffic_of_the_tenant_does_not_hide_the_version(watched: Watched, acme: Tenant) -> None:
    watched.move()
    watched.serve(acme, 20, MODEL_FAILED)
    watched.repeat_last(MAX_READ, model="acme/busy@1", status="completed")
    watched.repeat_last(MAX_READ, endpoint=BATCHES)
    assert shares(watched.check()) == {1: 100}


def test_a_tenants_requests_are_read_once_for_all_its_canaries(watched: Watched, acme: Tenant) -> None:
    for name, number in (("early", 2), ("other", 3)):
        watched.aliases.set(watched.adapter_id, name, {1: 100})
        watched.aliases.set(watched.adapter_id, name, {number: 100}, canary=RULE)
    watched.serve(acme, 9, MODEL_FAILED)
    watched.move()
    watched.serve(acme, 1, MODEL_FAILED)
    statements = list[str]()

    def note(connection: Connection, cursor: Any, statement: str, *rest: Any) -> None:
        statements.append(statement)

    event.listen(watched.database._engine, "before_cursor_execute", note)
    alias = watched.check()
    event.remove(watched.database._engine, "before_cursor_execute", note)
    assert sum("FROM usage_events" in statement for statement in statements) == 1
    assert shares(alias) == {1: 90, 2: 10}, "each alias has its own start"
    assert shares(watched.aliases.get(watched.adapter_id, "early")) == {1: 100}
    assert shares(watched.aliases.get(watched.adapter_id, "other")) == {3: 100}


def test_a_call_reads_no_further_page_after_enough_tenants(
    watched: Watched, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aliases, "WATCHED_AT_ONCE", 1)
    for name in ("a", "b"):
        watched.aliases.set(watched.adapter_id, name, {1: 100})
        watched.aliases.set(watched.adapter_id, name, {2: 100}, canary=RULE)
    watched.serve(acme, 9, MODEL_FAILED)
    monkeypatch.setattr(canaries_module, "ENOUGH_TENANTS", 1)
    watched.check()
    assert [shares(watched.aliases.get(watched.adapter_id, name)) for name in ("a", "b")] == [{1: 100}, {2: 100}]


def test_move_ends_the_watch(watched: Watched, acme: Tenant) -> None:
    watched.move()
    watched.serve(acme, 9, MODEL_FAILED)
    watched.move(None)
    assert shares(watched.check()) == {1: 90, 2: 10}


def test_alias_that_has_moved_is_left_alone(watched: Watched, acme: Tenant) -> None:
    """Another server judged an older revision."""
    watched.move()
    watched.serve(acme, 9, MODEL_FAILED)
    canaries = Canaries(watched.database, AdapterRegistry(watched.database), watched.aliases, watched.metrics.evals)
    [seen], _ = watched.aliases.watched()
    watched.move(None)
    canaries._roll_back(seen, [2], "late")
    assert shares(watched.check()) == {1: 90, 2: 10}


def test_failures_of_another_cause_do_not_count(watched: Watched, acme: Tenant) -> None:
    """Overload, stopped engines and wrong requests."""
    watched.move()
    watched.serve(acme, 50, "failed")
    watched.serve(acme, 3)
    assert shares(watched.check()) == {1: 90, 2: 10}
    watched.serve(acme, 2, MODEL_FAILED)
    alias = watched.check()
    assert (shares(alias), alias.canary and alias.canary.verdict) == ({1: 100}, "version 2: 2 of 5 requests failed")


def test_ramp_returns_to_a_revision_without_the_failing_version(watched: Watched, acme: Tenant) -> None:
    watched.move()
    watched.move(shares={1: 50, 2: 50})
    watched.serve(acme, 9, MODEL_FAILED)
    assert shares(watched.check()) == {1: 100}


def test_only_the_version_that_failed_is_taken_back(watched: Watched, acme: Tenant) -> None:
    watched.move(None, {1: 30, 2: 70})
    moved = watched.move(shares={2: 80, 3: 20})
    assert moved.canary is not None
    assert moved.canary.versions == (2, 3)
    watched.serve(acme, 9)
    watched.serve(acme, 9, MODEL_FAILED, model="acme/support@3")
    alias = watched.check()
    assert shares(alias) == {1: 30, 2: 70}
    assert alias.canary is not None
    assert alias.canary.verdict == "version 3: 9 of 9 requests failed"


def test_every_version_that_failed_is_taken_back(watched: Watched, acme: Tenant) -> None:
    watched.move(None, {1: 30, 2: 70})
    watched.move(shares={2: 80, 3: 20})
    watched.serve(acme, 9, MODEL_FAILED)
    watched.serve(acme, 9, MODEL_FAILED, model="acme/support@3")
    alias = watched.check()
    assert shares(alias) == {1: 100}
    assert alias.canary is not None
    assert alias.canary.verdict == "version 2: 9 of 9 requests failed; version 3: 9 of 9 requests failed"


def test_revisions_that_can_no_longer_be_served_are_passed_over(watched: Watched, acme: Tenant) -> None:
    states = VersionStates(watched.database, AdapterRegistry(watched.database))
    watched.aliases.set(watched.adapter_id, "default", {3: 100})
    watched.move(shares={2: 100})
    states.archive(watched.adapter_id, 3)
    watched.serve(acme, 9, MODEL_FAILED)
    assert shares(watched.check()) == {1: 100}


def test_verdict_tells_that_there_is_nothing_to_return_to(watched: Watched, acme: Tenant) -> None:
    states = VersionStates(watched.database, AdapterRegistry(watched.database))
    moved = watched.move(shares={2: 100})
    for number in (1, 3):
        states.archive(watched.adapter_id, number)
    watched.serve(acme, 9, MODEL_FAILED)
    alias = watched.check()
    assert (shares(alias), alias.revision) == ({2: 100}, moved.revision)
    assert alias.canary is not None
    assert alias.canary.verdict == f"version 2: 9 of 9 requests failed; {NOT_ROLLED_BACK}"
    assert watched.check() == alias, "the verdict ends the watch"
    assert watched.num_rollbacks == 0
    [failed] = watched.failures()
    assert failed == {
        "alias": "default",
        "revision": moved.revision,
        "verdict": alias.canary.verdict,
        "rolled_back": False,
    }


def test_all_canaries_are_watched_except_those_with_a_verdict(
    watched: Watched, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aliases, "WATCHED_AT_ONCE", 2)
    names = [f"alias-{number}" for number in range(5)]
    for name in ("plain", *names):
        watched.aliases.set(watched.adapter_id, name, {1: 100})
    for name in names:
        alias = watched.aliases.set(watched.adapter_id, name, {2: 100}, canary=RULE)
        if name in names[:2]:
            watched.aliases.fail_canary(watched.adapter_id, name, alias.revision, [2], "version 2: slow")
    first, after = watched.aliases.watched()
    rest, end = watched.aliases.watched(after)
    assert [one.alias.name for one in (*first, *rest)] == names[2:]
    assert (len(first), end) == (2, aliases.FIRST)


def test_a_call_looks_at_a_bounded_number_of_canaries_and_the_next_goes_on(
    watched: Watched, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aliases, "WATCHED_AT_ONCE", 1)
    monkeypatch.setattr(canaries_module, "MAX_PAGES", 2)
    names = ["a", "b", "c"]
    for name in names:
        watched.aliases.set(watched.adapter_id, name, {1: 100})
        watched.aliases.set(watched.adapter_id, name, {2: 100}, canary=RULE)
    looked_at: list[str] = []
    monkeypatch.setattr(Canaries, "_check_one", lambda self, one, found: looked_at.append(one.alias.name))
    canaries = Canaries(watched.database, AdapterRegistry(watched.database), watched.aliases, watched.metrics.evals)
    for _ in range(3):
        canaries.check()
    assert looked_at == ["a", "b", "c", "a", "b"], "the second call has found the end"


def test_canary_that_cannot_be_read_or_judged_holds_up_no_other(
    watched: Watched, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        watched.aliases.set(watched.adapter_id, name, {1: 100})
        watched.aliases.set(watched.adapter_id, name, {2: 100}, canary=RULE)
    table = adapter_aliases.c
    with watched.database.write() as connection:
        change = update(adapter_aliases).where(table.name == "a")
        connection.execute(change.values(canary={"versions": [2], "verdict": None, "of_a_newer_server": 1}))
    check_one = Canaries._check_one

    def fail(self: Canaries, one: WatchedAlias, found: Mapping[int, Outcomes]) -> None:
        if one.alias.name == "b":
            raise KeyError("a mistake of ours")
        check_one(self, one, found)

    monkeypatch.setattr(Canaries, "_check_one", fail)
    watched.move()
    watched.serve(acme, 9, MODEL_FAILED)
    with capture_logs() as logs:
        assert shares(watched.check()) == {1: 100}
    assert [(log["log_level"], log["alias"]) for log in logs] == [
        ("error", "a"),
        ("error", "b"),
        ("warning", "default"),
    ]


def test_alias_that_is_removed_meanwhile_is_not_watched(
    watched: Watched, acme: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On PostgreSQL, each statement sees what other servers have committed since the one before."""
    watched.move()
    read = aliases._read

    def read_late(connection: Connection, adapter_ids: Sequence[str], name: str | None = None) -> Any:
        return [] if name == "removed" else read(connection, adapter_ids, name)

    watched.aliases.set(watched.adapter_id, "removed", {1: 100})
    watched.aliases.set(watched.adapter_id, "removed", {2: 100}, canary=RULE)
    monkeypatch.setattr(aliases, "_read", read_late)
    assert [one.alias.name for one in watched.aliases.watched()[0]] == ["default"]


@pytest.mark.parametrize(
    ("num_requests", "num_failed", "is_bad"),
    [(0, 0, False), (1, 1, False), (2, 2, True), (20, 2, False), (20, 3, True)],
)
def test_errors_are_judged_by_their_share(num_requests: int, num_failed: int, is_bad: bool) -> None:
    assert (judge(RULE, Outcomes(num_requests, num_failed, ())) is not None) is is_bad


def test_percentile_ignores_a_few_slow_requests() -> None:
    assert judge(RULE, Outcomes(100, 0, (0.1,) * 94 + (9.0,) * 6)) is not None
    assert judge(RULE, Outcomes(100, 0, (0.1,) * 95 + (9.0,) * 5)) is None
