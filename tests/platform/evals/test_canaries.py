from __future__ import annotations

import pytest

from loramux.adapter_store.registry.aliases import AdapterAliases
from loramux.adapter_store.registry.records import Alias, CanaryRule
from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.sharing import AdapterGrants
from loramux.migrations.database import Database
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenant, Tenants
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import ReservationRequest
from loramux.platform.evals.canaries import Canaries, judge
from loramux.platform.ledger.outcomes import Outcomes
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.telemetry.metrics import GatewayMetrics
from tests.platform.clocked_databases import FakeClock
from tests.platform.ready_adapters import add_ready_adapter, digest_of

RULE = CanaryRule(max_error_rate=0.1, max_first_token_s=2.0, min_requests=10)


class Watched:
    """The alias `default` of acme/support, which gives version 2 a tenth of the requests."""

    def __init__(self, database: Database, clock: FakeClock, acme: Tenant) -> None:
        self.database, self._clock = database, clock
        self.metrics = GatewayMetrics()
        digests = [digest_of(name) for name in ("one", "two")]
        self.adapter_id = add_ready_adapter(database, acme.id, "support", digests)
        self.aliases = AdapterAliases(database)
        self.aliases.set(self.adapter_id, "default", {1: 100})
        self._admission = Admission(database)
        self._num_requests = 0

    def move(self, rule: CanaryRule | None = RULE) -> Alias:
        self._clock.advance(1)
        return self.aliases.set(self.adapter_id, "default", {1: 90, 2: 10}, canary=rule)

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

    def check(self) -> Alias:
        registry = AdapterRegistry(self.database)
        Canaries(self.database, registry, self.aliases, self.metrics.evals).check()
        return self.aliases.get(self.adapter_id, "default")

    @property
    def num_rollbacks(self) -> float:
        return self.metrics.registry.get_sample_value("loramux_canary_rollbacks_total") or 0.0


@pytest.fixture
def watched(clocked: Database, clock: FakeClock, acme: Tenant) -> Watched:
    return Watched(clocked, clock, acme)


def shares(alias: Alias) -> dict[int, int]:
    return {target.number: target.weight for target in alias.targets}


def test_failing_version_is_taken_back(watched: Watched, acme: Tenant) -> None:
    watched.serve(acme, 5, "failed")
    watched.move()
    assert shares(watched.check()) == {1: 90, 2: 10}, "earlier requests do not count"
    watched.serve(acme, 3)
    watched.serve(acme, 1, "failed")
    assert shares(watched.check()) == {1: 90, 2: 10}, "one failure in the first ten is allowed"
    watched.serve(acme, 1, "failed")
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
    watched.serve(acme, 3, "failed")
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


def test_good_version_and_other_requests_stay(watched: Watched, acme: Tenant) -> None:
    watched.move()
    watched.serve(acme, 20)
    watched.serve(acme, 5, "aborted")
    watched.serve(acme, 20, "failed", model="acme/support@1")
    watched.serve(acme, 20, "failed", endpoint="evals")
    watched.serve(Tenants(watched.database).create("other"), 20, "failed")
    alias = watched.check()
    assert (shares(alias), alias.canary and alias.canary.verdict) == ({1: 90, 2: 10}, None)
    assert watched.num_rollbacks == 0


def test_requests_of_tenants_with_a_grant_count(watched: Watched, acme: Tenant) -> None:
    other = Tenants(watched.database).create("other")
    adapter = AdapterRegistry(watched.database).get_adapter(watched.adapter_id)
    assert adapter is not None
    AdapterGrants(watched.database).add(adapter, other.id)
    watched.move()
    watched.serve(other, 2, "failed")
    assert shares(watched.check()) == {1: 100}


def test_move_ends_the_watch(watched: Watched, acme: Tenant) -> None:
    watched.move()
    watched.serve(acme, 9, "failed")
    watched.move(None)
    assert shares(watched.check()) == {1: 90, 2: 10}


def test_alias_that_has_moved_is_left_alone(watched: Watched, acme: Tenant) -> None:
    """Another server judged an older revision."""
    watched.move()
    watched.serve(acme, 9, "failed")
    canaries = Canaries(watched.database, AdapterRegistry(watched.database), watched.aliases, watched.metrics.evals)
    [seen] = watched.aliases.watched()
    watched.move(None)
    canaries._roll_back(seen, "late")
    assert shares(watched.check()) == {1: 90, 2: 10}


@pytest.mark.parametrize(
    ("num_requests", "num_failed", "is_bad"),
    [(0, 0, False), (1, 1, False), (2, 2, True), (20, 2, False), (20, 3, True)],
)
def test_errors_are_judged_by_their_share(num_requests: int, num_failed: int, is_bad: bool) -> None:
    assert (judge(RULE, Outcomes(num_requests, num_failed, ())) is not None) is is_bad


def test_percentile_ignores_a_few_slow_requests() -> None:
    assert judge(RULE, Outcomes(100, 0, (0.1,) * 95 + (9.0,) * 5)) is not None
    assert judge(RULE, Outcomes(100, 0, (0.1,) * 96 + (9.0,) * 4)) is None
