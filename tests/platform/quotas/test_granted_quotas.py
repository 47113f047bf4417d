from __future__ import annotations

from typing import Any

import pytest

from loramux.adapter_store.registry.registry import AdapterRegistry
from loramux.adapter_store.registry.sharing import AdapterGrants
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.platform.accounts.api_keys import ApiKeys
from loramux.platform.accounts.tenants import Tenant, Tenants
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import Reservation, ReservationRequest
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.quotas.decisions import POLICY_HEADER, QuotaExceeded, RequestTooLarge
from loramux.platform.quotas.overview import QuotaCaller, QuotaOverview
from loramux.platform.quotas.policies import QuotaPolicies

METRICS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests", "tokens_per_day", "tokens_per_month")


class Two:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.owner, self.grantee = (Tenants(database).create(slug) for slug in ("owner", "grantee"))
        self.adapter = AdapterRegistry(database).create_adapter(self.owner.id, "support")
        self.admission = Admission(database)
        self.keys = {one.id: ApiKeys(database).create(one.id, "key").key.id for one in (self.owner, self.grantee)}

    def limit(self, metric: str, limit: int, mode: str = "hard") -> str:
        return QuotaPolicies(self.database).set(self.adapter.id, metric, limit, mode=mode).id

    def reserve(self, tenant: Tenant, tokens: int = 1) -> Reservation:
        request = ReservationRequest(
            request_id=new_id("req"),
            tenant_id=tenant.id,
            api_key_id=self.keys[tenant.id],
            model="owner/support@1",
            adapter_version_id=None,
            adapter_id=self.adapter.id,
            endpoint="completions",
            prompt_tokens=1,
            reserved_tokens=tokens,
        )
        return self.admission.reserve(request)

    def remaining(self, tenant: Tenant) -> int:
        caller = QuotaCaller(tenant_id=tenant.id, adapter_id=self.adapter.id)
        (limit,) = QuotaOverview(self.database).effective(caller)
        return limit.remaining


@pytest.fixture
def two(clocked: Database) -> Two:
    return Two(clocked)


@pytest.mark.parametrize("metric", METRICS)
def test_grantee_does_not_spend_the_owners_share(two: Two, metric: str) -> None:
    two.limit(metric, 3)
    for _ in range(3):
        two.reserve(two.grantee)
    with pytest.raises(QuotaExceeded):
        two.reserve(two.grantee)
    assert (two.remaining(two.owner), two.remaining(two.grantee)) == (3, 0)
    for _ in range(3):
        two.reserve(two.owner)
    with pytest.raises(QuotaExceeded):
        two.reserve(two.owner)


def test_reserved_tokens_return_to_the_caller_that_reserved_them(two: Two) -> None:
    two.limit("tokens_per_day", 100)
    owners, grantees = two.reserve(two.owner, 30), two.reserve(two.grantee, 50)
    assert two.admission.extend(grantees.request_id, 50)
    assert not two.admission.extend(grantees.request_id, 1)
    assert (two.remaining(two.owner), two.remaining(two.grantee)) == (70, 0)
    for reservation in (owners, grantees):
        spent = Settlement(status="completed", prompt_tokens=1, completion_tokens=4)
        assert two.admission.settle(reservation.request_id, spent)
    assert (two.remaining(two.owner), two.remaining(two.grantee)) == (95, 95)


def test_changed_limit_applies_to_every_callers_next_request(two: Two, clock: Any) -> None:
    two.limit("requests_per_minute", 10)
    for tenant, times in ((two.owner, 2), (two.grantee, 9)):
        for _ in range(times):
            two.reserve(tenant)
    clock.advance(6)
    two.limit("requests_per_minute", 4)
    assert (two.remaining(two.owner), two.remaining(two.grantee)) == (4, 2), "earned at the old rate"
    clock.advance(15)
    assert two.remaining(two.grantee) == 3


def test_soft_limit_of_the_owner_counts_each_caller_separately(two: Two) -> None:
    two.limit("concurrent_requests", 1, mode="soft")
    two.reserve(two.owner)
    assert two.reserve(two.grantee).exceeded == ()
    assert len(two.reserve(two.grantee).exceeded) == 1


@pytest.mark.parametrize("metric", METRICS)
def test_refusal_hides_the_owners_policy_from_a_grantee(two: Two, metric: str) -> None:
    policy_id = two.limit(metric, 7)
    for tenant, is_told in ((two.owner, True), (two.grantee, False)):
        for _ in range(7):
            two.reserve(tenant)
        with pytest.raises(QuotaExceeded) as caught:
            two.reserve(tenant)
        assert ("7" in caught.value.message) is is_told
        assert caught.value.headers.get(POLICY_HEADER) == (policy_id if is_told else None)
        assert metric in caught.value.message
        # Only the first two metrics have headers.
        shown = {name: value for name, value in caught.value.headers.items() if name.startswith("x-ratelimit-limit")}
        assert set(shown.values()) == ({"7"} if is_told and metric in METRICS[:2] else set())


def test_refusal_of_a_too_large_request_hides_the_owners_limit(two: Two) -> None:
    policy_id = two.limit("tokens_per_minute", 777)
    for tenant, is_told in ((two.owner, True), (two.grantee, False)):
        with pytest.raises(RequestTooLarge) as caught:
            two.reserve(tenant, 1000)
        assert ("777" in caught.value.message) is is_told
        assert caught.value.headers.get(POLICY_HEADER) == (policy_id if is_told else None)


@pytest.mark.anyio
async def test_headers_show_a_grantee_its_own_remaining_quota(gateway: Any) -> None:
    adapter_id = gateway.add_adapter("other", "secret")
    adapter = AdapterRegistry(gateway.database).get_adapter(adapter_id)
    assert adapter is not None
    AdapterGrants(gateway.database).add(adapter, gateway.tenant.id)
    QuotaPolicies(gateway.database).set(adapter_id, "requests_per_minute", 5)
    owner = {"authorization": f"Bearer {gateway.key_of('other')}"}

    async def rest(**headers: str) -> str:
        body = {"model": "other/secret", "prompt": "a", "max_tokens": 1}
        response = await gateway.http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        is_owner = bool(headers)
        assert ("x-ratelimit-limit-requests" in response.headers) is is_owner
        assert ("x-ratelimit-reset-requests" in response.headers) is is_owner
        return str(response.headers["x-ratelimit-remaining-requests"])

    assert [await rest(**owner) for _ in range(3)] == ["4", "3", "2"]
    assert [await rest() for _ in range(2)] == ["4", "3"]
    assert await rest(**owner) == "1"
