from __future__ import annotations

import asyncio
import hashlib

import httpx
import pytest
from sqlalchemy import select

from loramux.engine.protocol.messages import Load
from loramux.migrations import schema
from loramux.migrations.database import Database
from loramux.migrations.identifiers import new_id
from loramux.platform.accounts.tenants import Tenant
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import LoadCharge, ReservationRequest
from loramux.platform.engine_link.engine_client import EngineUnavailable
from loramux.platform.generation.cold_loads import LOAD_S, STALE_S, ColdLoads
from loramux.platform.ledger.settlement import Settlement
from loramux.platform.quotas.counters import UNITS
from loramux.platform.quotas.decisions import QuotaExceeded
from loramux.platform.quotas.policies import QuotaPolicies
from tests.platform.gateways import Gateway
from tests.platform.scripted_engine import ScriptedEngine

METRIC = "cold_loads_per_minute"


def digest(name: str) -> str:
    return hashlib.sha256(f"acme/{name}@1".encode()).hexdigest()


async def ask(gateway: Gateway, model: str) -> httpx.Response:
    return await gateway.http.post("/v1/completions", json={"model": model, "prompt": "hello", "max_tokens": 2})


@pytest.mark.anyio
async def test_cold_load_over_the_limit_is_refused_but_warm_requests_run(gateway: Gateway) -> None:
    for name in ("first", "second"):
        gateway.add_adapter("acme", name)
    policy = QuotaPolicies(gateway.database).set(gateway.tenant.id, METRIC, 1)
    assert (await ask(gateway, "first")).status_code == 200
    refused = await ask(gateway, "second")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert refused.json()["error"]["param"] == METRIC
    assert refused.headers["x-loramux-quota-policy"] == policy.id
    assert 0 < int(refused.headers["retry-after"]) <= 60
    assert (await ask(gateway, "first")).status_code == 200
    assert (await ask(gateway, "base")).status_code == 200
    assert [add.digest for add in gateway.engine.adds] == [digest("first"), digest("first"), None]


@pytest.mark.anyio
async def test_resident_adapter_is_not_charged_as_a_load(gateway: Gateway) -> None:
    gateway.add_adapter("acme", "held")
    gateway.add_adapter("acme", "other")
    gateway.engine.resident[digest("held")] = 1
    gateway.limit(METRIC, 0)
    assert (await ask(gateway, "held")).status_code == 200
    refused = await ask(gateway, "other")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")


@pytest.mark.anyio
async def test_concurrent_requests_pay_for_one_load(gateway: Gateway) -> None:
    gateway.add_adapter("acme", "hot")
    gateway.limit(METRIC, 1)
    answers = await asyncio.gather(*(ask(gateway, "hot") for _ in range(5)))
    assert [answer.status_code for answer in answers] == [200] * 5


@pytest.mark.anyio
async def test_soft_limit_admits_the_load_and_reports_it(gateway: Gateway) -> None:
    gateway.add_adapter("acme", "first")
    QuotaPolicies(gateway.database).set(gateway.tenant.id, METRIC, 0, mode="soft")
    answer = await ask(gateway, "first")
    assert (answer.status_code, answer.headers["x-loramux-quota-exceeded"]) == (200, METRIC)
    assert "x-loramux-quota-exceeded" not in (await ask(gateway, "base")).headers


@pytest.mark.anyio
async def test_evicted_adapter_is_cold_but_a_loading_one_is_not(anyio_backend: str) -> None:
    engine, now_s = ScriptedEngine(), [0.0]
    adapters = ColdLoads(engine, clock=lambda: now_s[0])

    async def is_cold() -> bool:
        async with adapters.admitting("ten_1", "digest") as found:
            return found

    assert await is_cold()
    now_s[0] = LOAD_S - 1
    await adapters.refresh()
    assert not await is_cold(), "the engine is still loading it"
    engine.resident["digest"] = 1
    await adapters.refresh()
    del engine.resident["digest"]
    assert not await is_cold(), "an eviction is unknown until the next report"
    await adapters.refresh()
    assert await is_cold()
    now_s[0] = 3 * LOAD_S
    await adapters.refresh()
    assert await is_cold(), "a load that never ended is forgotten"


@pytest.mark.anyio
async def test_refused_request_leaves_the_load_to_the_next_one(anyio_backend: str) -> None:
    adapters = ColdLoads(ScriptedEngine())

    async def refuse() -> None:
        async with adapters.admitting("ten_1", "digest") as is_cold:
            raise RuntimeError(is_cold)

    with pytest.raises(RuntimeError, match="True"):
        await refuse()
    async with adapters.admitting("ten_1", "digest") as is_cold:
        assert is_cold


@pytest.mark.anyio
async def test_nothing_is_cold_while_the_engine_does_not_answer(anyio_backend: str) -> None:
    engine = ScriptedEngine()
    engine.die()
    async with ColdLoads(engine).admitting("ten_1", "digest") as is_cold:
        assert not is_cold


@pytest.mark.parametrize(
    ("subject", "has_begun", "left"),
    [("tenant", True, 1), ("key", False, 2), ("platform", True, 1)],
    ids=["begun", "never begun", "begun under the platform's"],
)
def test_load_is_refunded_if_the_request_never_began(
    clocked: Database, acme: Tenant, acme_key: str, subject: str, has_begun: bool, left: int
) -> None:
    QuotaPolicies(clocked).set({"tenant": acme.id, "key": acme_key}.get(subject, subject), METRIC, 2)
    admission = Admission(clocked)

    def request(loads_adapter: bool) -> ReservationRequest:
        return ReservationRequest(
            request_id=new_id("req"),
            tenant_id=acme.id,
            api_key_id=acme_key,
            model="acme/support@1",
            adapter_version_id=None,
            endpoint="completions",
            prompt_tokens=1,
            reserved_tokens=2,
            loads_adapter=loads_adapter,
        )

    reserved = admission.reserve(request(True))
    never_ran = Settlement(status="aborted", prompt_tokens=0, completion_tokens=0, has_run=False, has_begun=has_begun)
    assert admission.settle(reserved.request_id, never_ran)
    with clocked.read() as connection:
        assert connection.execute(select(schema.quota_counters.c.level)).scalar_one() == left * UNITS
    for _ in range(left):
        admission.reserve(request(True))
    admission.reserve(request(False))
    with pytest.raises(QuotaExceeded, match=METRIC):
        admission.reserve(request(True))


def ahead(gateway: Gateway, adapter_id: str) -> LoadCharge:
    return LoadCharge(tenant_id=gateway.tenant.id, api_key_id=new_id("key"), adapter_id=adapter_id)


@pytest.mark.anyio
async def test_preload_is_charged_and_the_next_request_is_not(gateway: Gateway) -> None:
    adapter_ids = {name: gateway.add_adapter("acme", name) for name in ("first", "second", "third")}
    gateway.limit(METRIC, 2)
    loads = gateway.services.run.loads
    # Let the engine report its resident adapters before the second adapter is loaded.
    assert (await ask(gateway, "first")).status_code == 200
    answer = await loads.load(digest("second"), ahead(gateway, adapter_ids["second"]), 1.0)
    assert answer.state == "resident"
    assert (await ask(gateway, "second")).status_code == 200
    with pytest.raises(QuotaExceeded, match=METRIC) as refused:
        await loads.load(digest("third"), ahead(gateway, adapter_ids["third"]), 1.0)
    assert 0 < (refused.value.retry_after_s or 0) <= 60
    assert digest("third") not in gateway.engine.resident
    assert (await loads.load(digest("second"), ahead(gateway, adapter_ids["second"]), 1.0)).state == "resident"


@pytest.mark.anyio
@pytest.mark.parametrize("subject", ["key", "adapter", "platform"])
async def test_preload_counts_for_key_adapter_and_platform_policies(gateway_on_each: Gateway, subject: str) -> None:
    gateway = gateway_on_each
    adapter_ids = [gateway.add_adapter("acme", name) for name in ("first", "second")]
    key = gateway.services.callers.api_keys.create(gateway.tenant.id, "pusher").key
    subjects = {"key": key.id, "adapter": adapter_ids[1], "platform": "platform"}
    QuotaPolicies(gateway.database).set(subjects[subject], METRIC, 1)
    charge = LoadCharge(tenant_id=gateway.tenant.id, api_key_id=key.id, adapter_id=adapter_ids[1])
    # Nothing is cold before the engine's first report.
    await gateway.services.run.loads.load(digest("first"), charge, 1.0)
    with pytest.raises(QuotaExceeded, match=METRIC):
        await gateway.services.run.loads.load(digest("second"), charge, 1.0)


@pytest.mark.anyio
async def test_concurrent_preloads_pay_once(gateway: Gateway) -> None:
    adapter_id = gateway.add_adapter("acme", "hot")
    gateway.limit(METRIC, 1)
    charge = ahead(gateway, adapter_id)
    answers = await asyncio.gather(*(gateway.services.run.loads.load(digest("hot"), charge, 1.0) for _ in range(5)))
    assert [answer.state for answer in answers] == ["resident"] * 5
    assert (await ask(gateway, "hot")).status_code == 200


@pytest.mark.anyio
async def test_operator_preload_charges_nobody_and_makes_requests_warm(gateway: Gateway) -> None:
    for name in ("first", "second"):
        gateway.add_adapter("acme", name)
    gateway.limit(METRIC, 1)
    assert (await ask(gateway, "first")).status_code == 200
    await gateway.services.run.loads.load(digest("second"), None, 1.0)
    assert (await ask(gateway, "second")).status_code == 200


@pytest.mark.anyio
async def test_adapter_loaded_by_another_gateway_is_not_refused(gateway: Gateway) -> None:
    for name in ("first", "second"):
        gateway.add_adapter("acme", name)
    gateway.limit(METRIC, 1)
    assert (await ask(gateway, "first")).status_code == 200
    # Another gateway loaded the adapter after the engine's last report.
    await gateway.engine.call(Load(digest=digest("second")), 1.0)
    assert (await ask(gateway, "second")).status_code == 200


@pytest.mark.anyio
async def test_failed_load_leaves_the_adapter_cold(gateway: Gateway) -> None:
    adapter_id = gateway.add_adapter("acme", "broken")
    gateway.limit(METRIC, 1)
    loads, charge = gateway.services.run.loads, ahead(gateway, adapter_id)
    gateway.engine.die()
    with pytest.raises(EngineUnavailable):
        await loads.load(digest("broken"), charge, 1.0)
    gateway.engine.revive()
    gateway.engine.unloadable.add(digest("broken"))
    assert (await loads.load(digest("broken"), charge, 1.0)).state == "failed"
    with pytest.raises(QuotaExceeded, match=METRIC):
        await loads.load(digest("broken"), charge, 1.0)


@pytest.mark.anyio
async def test_stale_report_is_refreshed_before_an_adapter_is_called_cold(
    anyio_backend: str,
) -> None:
    engine, now_s = ScriptedEngine(), [0.0]
    adapters = ColdLoads(engine, clock=lambda: now_s[0])
    await adapters.refresh()
    engine.resident["digest"] = 1
    now_s[0] = STALE_S
    async with adapters.admitting("ten_1", "digest") as is_cold:
        assert not is_cold


@pytest.mark.anyio
async def test_adapter_held_by_another_server_is_cold_only_for_the_own_pool() -> None:
    engine, held = ScriptedEngine(), {digest("held")}
    cold_loads = ColdLoads(engine, is_held_elsewhere=lambda digest, base_id: digest in held)

    async def is_cold(name: str, is_tied: bool = False) -> bool:
        async with cold_loads.admitting("ten_1", digest(name), is_tied) as is_cold:
            return is_cold

    assert [await is_cold(name) for name in ("held", "other")] == [False, True]
    assert await is_cold("held", is_tied=True)


@pytest.mark.anyio
async def test_request_of_another_base_is_cold_if_no_server_of_that_base_holds_the_adapter() -> None:
    engine = ScriptedEngine()
    engine.resident[digest("resident")] = 1
    held = {(digest("held"), "other")}
    cold_loads = ColdLoads(engine, is_held_elsewhere=lambda digest, base_id: (digest, base_id) in held)

    async def is_cold(name: str, other_base: str | None) -> bool:
        async with cold_loads.admitting("ten_1", digest(name), other_base=other_base) as is_cold:
            return is_cold

    assert [await is_cold(name, "other") for name in ("held", "resident", "resident")] == [False, True, False]
    assert [await is_cold(name, None) for name in ("held", "resident")] == [True, False]
