from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from loramux.admin.rest.adapters import warm_and_drain
from loramux.admin.rest.adapters.warm_and_drain import MAX_UNLOADING
from loramux.engine.protocol.messages import AdapterState, Load, Unload
from loramux.platform.admission.admission import Admission
from loramux.platform.admission.records import ReservationRequest
from loramux.platform.ledger.settlement import Settlement
from tests.admin.admin_side import AdminSide
from tests.admin.rest.adapters.ready_versions import add_ready_versions
from tests.admin.rest.tenants_and_keys import bearer, new_key, new_tenant
from tests.platform.ready_adapters import add_ready_adapter

pytestmark = pytest.mark.anyio


@pytest.fixture
async def base(http: httpx.AsyncClient, admin_side: AdminSide) -> str:
    await new_tenant(http, "acme")
    created = (await http.post("/admin/v1/adapters", json={"tenant": "acme", "name": "support"})).json()
    add_ready_versions(admin_side.services.database, created["id"], 3)
    return f"/admin/v1/adapters/{created['id']}"


def targets(alias: httpx.Response) -> dict[int, int]:
    assert alias.status_code == 200, alias.text
    return {target["version"]: target["weight"] for target in alias.json()["targets"]}


async def test_canary_weight_grows_and_rolls_back_in_one_call(http: httpx.AsyncClient, base: str) -> None:
    canary = {"targets": [{"version": 1, "weight": 90}, {"version": 2, "weight": 10}]}
    assert targets(await http.put(f"{base}/aliases/default", json=canary)) == {1: 90, 2: 10}
    moved = await http.put(f"{base}/aliases/default", json={"version": 2})
    assert targets(moved) == {2: 100}
    assert (moved.json()["revision"], moved.headers["etag"]) == (3, '"3"')
    assert targets(await http.post(f"{base}/aliases/default/rollback")) == {1: 90, 2: 10}
    assert targets(await http.post(f"{base}/aliases/default/rollback", json={"revision": 1})) == {1: 100}
    history = (await http.get(f"{base}/aliases/default/history", params={"limit": 2})).json()
    assert [(change["revision"], change["action"]) for change in history["data"]] == [(5, "rollback"), (4, "rollback")]
    assert history["has_more"]
    assert history["data"][0]["actor"], "the actor is recorded"
    older = await http.get(f"{base}/aliases/default/history", params={"after": history["last_id"]})
    assert [change["revision"] for change in older.json()["data"]] == [3, 2, 1]
    nothing = await http.post(f"{base}/aliases/default/rollback", json={"revision": 5})
    assert (nothing.status_code, nothing.json()["error"]["code"]) == (409, "nothing_to_roll_back")


async def test_stale_etag_does_not_move_an_alias(http: httpx.AsyncClient, base: str) -> None:
    etag = (await http.get(f"{base}/aliases/default")).headers["etag"]
    first = await http.put(f"{base}/aliases/default", json={"version": 2}, headers={"if-match": etag})
    assert first.status_code == 200
    second = await http.put(f"{base}/aliases/default", json={"version": 3}, headers={"if-match": etag})
    assert (second.status_code, second.json()["error"]["code"]) == (412, "precondition_failed")
    back = await http.post(f"{base}/aliases/default/rollback", headers={"if-match": etag})
    assert (back.status_code, back.json()["error"]["code"]) == (412, "precondition_failed")
    assert targets(await http.get(f"{base}/aliases/default")) == {2: 100}, "the alias is unchanged"
    for malformed in ("3", '"x"', 'W/"1"', '"99999999999"'):
        refused = await http.put(f"{base}/aliases/default", json={"version": 3}, headers={"if-match": malformed})
        assert refused.status_code == 400, malformed
    assert targets(await http.get(f"{base}/aliases/default")) == {2: 100}


async def test_stale_etag_does_not_delete_an_alias(http: httpx.AsyncClient, base: str) -> None:
    path = f"{base}/aliases/canary"
    stale = (await http.put(path, json={"version": 2})).headers["etag"]
    etag = (await http.put(path, json={"version": 3})).headers["etag"]
    refused = await http.delete(path, headers={"if-match": stale})
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (412, "precondition_failed", "If-Match")
    assert (await http.delete(path, headers={"if-match": "3"})).status_code == 400, "no ETag"
    assert targets(await http.get(path)) == {3: 100}
    assert (await http.delete(path, headers={"if-match": etag})).status_code == 204
    assert (await http.delete(path, headers={"if-match": etag})).status_code == 404
    await http.put(path, json={"version": 2})
    assert (await http.delete(path, headers={"if-match": etag})).status_code == 412, "a different alias with that name"
    for headers in ({"if-match": "*"}, {}):
        await http.put(path, json={"version": 2})
        assert (await http.delete(path, headers=headers)).status_code == 204, "whatever the alias targets"


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        pytest.param({}, 400, "invalid_value", id="nothing"),
        pytest.param({"version": 1, "targets": []}, 400, "invalid_value", id="both"),
        pytest.param({"targets": []}, 400, "invalid_targets", id="none"),
        pytest.param({"targets": [{"version": 1}, {"version": 1}]}, 400, "invalid_targets", id="twice"),
        pytest.param({"targets": [{"version": 1, "weight": 0}]}, 400, "invalid_weight", id="no weight"),
        pytest.param({"targets": [{"version": 1, "weight": -5}]}, 400, "invalid_weight", id="negative"),
        pytest.param({"targets": [{"version": 1, "weight": 10**30}]}, 400, "invalid_weight", id="huge weight"),
        pytest.param({"targets": [{"version": 1, "weight": 1.5}]}, 400, "invalid_type", id="fraction"),
        pytest.param({"targets": [{"version": n} for n in range(1, 10)]}, 400, "invalid_targets", id="nine"),
        pytest.param({"targets": [{"version": n} for n in range(1, 70)]}, 400, "invalid_value", id="seventy"),
        pytest.param({"version": "1"}, 400, "invalid_type", id="text"),
        pytest.param({"version": True}, 400, "invalid_type", id="boolean"),
        pytest.param({"version": 9}, 404, "version_not_found", id="unknown"),
        pytest.param({"version": 10**30}, 404, "version_not_found", id="huge"),
        pytest.param({"version": 1, "extra": 1}, 400, "unknown_parameter", id="unknown field"),
    ],
)
async def test_invalid_alias_target_is_refused(
    http: httpx.AsyncClient, base: str, body: dict[str, Any], status: int, code: str
) -> None:
    refused = await http.put(f"{base}/aliases/default", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code), refused.text
    assert targets(await http.get(f"{base}/aliases/default")) == {1: 100}


async def test_versions_are_loaded_before_an_alias_moves(
    http: httpx.AsyncClient, base: str, admin_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = (await http.get(f"{base}/versions/2")).json()["digest"]
    assert digest not in admin_side.engine.resident
    assert targets(await http.put(f"{base}/aliases/default", json={"version": 2})) == {2: 100}
    assert digest in admin_side.engine.resident

    async def fail(load: Load, timeout_s: float) -> AdapterState:
        return AdapterState(call_id="load", digest=load.digest, state="failed", code="adapter_unavailable")

    monkeypatch.setattr(admin_side.engine, "call", fail)
    refused = await http.put(f"{base}/aliases/default", json={"version": 3})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "adapter_unavailable")
    assert "retry-after" in refused.headers
    assert targets(await http.get(f"{base}/aliases/default")) == {2: 100}

    async def hang(load: Load, timeout_s: float) -> AdapterState:
        raise TimeoutError

    monkeypatch.setattr(admin_side.engine, "call", hang)
    late = await http.post(f"{base}/aliases/default/rollback")
    assert (late.status_code, late.json()["error"]["code"]) == (503, "adapter_loading")
    assert targets(await http.get(f"{base}/aliases/default")) == {2: 100}
    cold = await http.put(f"{base}/aliases/default", json={"version": 3, "warm": False})
    assert targets(cold) == {3: 100}


async def test_archived_and_disabled_versions_leave_the_engine(
    http: httpx.AsyncClient, base: str, admin_side: AdminSide
) -> None:
    digests = [(await http.get(f"{base}/versions/{number}")).json()["digest"] for number in (1, 2, 3)]
    for digest in digests:
        await admin_side.engine.call(Load(digest=digest), 1.0)
    in_use = await http.post(f"{base}/versions/1/archive")
    assert (in_use.status_code, in_use.json()["error"]["code"]) == (409, "version_in_use")
    archived = (await http.post(f"{base}/versions/2/archive")).json()
    assert (archived["state"], archived["drained"]) == ("archived", True)
    assert set(admin_side.engine.resident) == {digests[0], digests[2]}
    moved = await http.put(f"{base}/aliases/default", json={"version": 2})
    assert (moved.status_code, moved.json()["error"]["code"]) == (409, "version_not_ready")
    assert (await http.post(f"{base}/versions/2/restore")).json()["state"] == "ready"
    disabled = (await http.post(f"{base}/disable")).json()
    assert (disabled["state"], disabled["drained"]) == ("disabled", True)
    assert not admin_side.engine.resident
    assert (await http.get(base)).json()["state"] == "disabled"
    assert (await http.post(f"{base}/enable")).json()["state"] == "active"


@pytest.mark.parametrize("is_shared", [False, True])
async def test_version_is_drained_once_its_own_requests_have_ended(
    http: httpx.AsyncClient, base: str, admin_side: AdminSide, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    database, tenants = admin_side.services.database, admin_side.services.accounts.tenants
    monkeypatch.setattr(warm_and_drain, "DRAIN_TIMEOUT_S", 0.0)
    version = (await http.get(f"{base}/versions/2")).json()
    if is_shared:
        add_ready_adapter(database, tenants.create("globex").id, "theirs", [version["digest"]])
    [acme] = [tenant for tenant in tenants.list(10).data if tenant.slug == "acme"]
    admission = Admission(database)
    admission.reserve(
        ReservationRequest(
            request_id="req_1",
            tenant_id=acme.id,
            api_key_id=(await new_key(http, "acme"))["id"],
            model="support",
            adapter_id=version["adapter_id"],
            adapter_version_id=version["id"],
            endpoint="completions",
            prompt_tokens=1,
            reserved_tokens=1,
        )
    )
    assert not (await http.post(f"{base}/versions/2/archive")).json()["drained"]
    assert (await http.post(f"{base}/versions/3/archive")).json()["drained"]
    assert not (await http.post(f"{base}/disable")).json()["drained"]
    admission.settle("req_1", Settlement(status="completed", prompt_tokens=1, completion_tokens=0))
    assert (await http.post(f"{base}/disable")).json()["drained"]


async def test_few_versions_are_unloaded_at_the_same_time(
    http: httpx.AsyncClient, base: str, admin_side: AdminSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    [acme] = [tenant for tenant in admin_side.services.accounts.tenants.list(10).data if tenant.slug == "acme"]
    digests = {f"{number:064x}" for number in range(3 * MAX_UNLOADING)}
    adapter_id = add_ready_adapter(admin_side.services.database, acme.id, "long", sorted(digests))
    unloading, unloaded, most = set[str](), set[str](), 0

    async def unload(message: Unload, timeout_s: float) -> None:
        nonlocal most
        unloading.add(message.digest)
        most = max(most, len(unloading))
        await asyncio.sleep(0)
        unloading.remove(message.digest)
        unloaded.add(message.digest)
        raise TimeoutError

    monkeypatch.setattr(admin_side.engine, "call", unload)
    assert (await http.post(f"/admin/v1/adapters/{adapter_id}/disable")).json()["drained"]
    assert (unloaded, most) == (digests, MAX_UNLOADING)


async def test_a_tenant_cannot_lift_a_quarantine(http: httpx.AsyncClient, base: str) -> None:
    own = bearer((await new_key(http, "acme", "tenant:admin"))["secret"])
    assert (await http.post(f"{base}/versions/1/quarantine", headers=own)).status_code == 403
    assert (await http.post(f"{base}/versions/1/quarantine")).json()["state"] == "quarantined"
    lifted = await http.post(f"{base}/versions/1/restore", headers=own)
    assert (lifted.status_code, lifted.json()["error"]["code"]) == (409, "version_not_ready")
    assert (await http.post(f"{base}/versions/1/restore")).json()["state"] == "ready"


async def test_grants_are_added_by_the_operator_and_removed_by_the_owner(http: httpx.AsyncClient, base: str) -> None:
    globex = await new_tenant(http, "globex")
    owner = bearer((await new_key(http, "acme", "tenant:admin"))["secret"])
    foreign = bearer((await new_key(http, "globex", "tenant:admin"))["secret"])
    assert (await http.put(f"{base}/grants/globex", headers=owner)).status_code == 403
    granted = (await http.put(f"{base}/grants/globex")).json()
    assert (granted["tenant_id"], granted["tenant"]) == (globex, "globex")
    assert (await http.get(f"{base}/grants", headers=owner)).json()["data"] == [granted]
    # A tenant that can only call an adapter cannot administer it. Admin routes respond as if the adapter did not exist.
    for path in ("", "/grants", "/aliases", "/aliases/default", "/versions"):
        assert (await http.get(base + path, headers=foreign)).status_code == 404, path
    assert (await http.delete(f"{base}/grants/globex", headers=owner)).status_code == 204
    for tenant in ("globex", "nobody"):
        again = await http.delete(f"{base}/grants/{tenant}", headers=owner)
        assert (again.status_code, again.json()["error"]["code"]) == (404, "grant_not_found")
    own = await http.put(f"{base}/grants/acme")
    assert (own.status_code, own.json()["error"]["code"]) == (400, "own_adapter")


async def test_overflow_is_a_model_that_the_owner_may_call(
    http: httpx.AsyncClient, base: str, admin_side: AdminSide
) -> None:
    created = (await http.post("/admin/v1/adapters", json={"tenant": "acme", "name": "small"})).json()
    add_ready_versions(admin_side.services.database, created["id"], 1)
    await new_tenant(http, "globex")
    foreign = (await http.post("/admin/v1/adapters", json={"tenant": "globex", "name": "theirs"})).json()
    add_ready_versions(admin_side.services.database, foreign["id"], 1)

    async def move(overflow: str | None) -> httpx.Response:
        return await http.put(f"{base}/aliases/default", json={"version": 1, "warm": False, "overflow": overflow})

    served = admin_side.services.engine.self_check.served_name
    for asked, stored in ((served, served), ("small", "acme/small"), ("acme/support@2", "acme/support@2")):
        moved = await move(asked)
        assert (moved.status_code, moved.json()["overflow"]) == (200, stored), moved.text
    for asked in ("globex/theirs", "globex/none", "acme/small@9", "a b"):
        refused = await move(asked)
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "overflow"), asked
    for asked in ("support", "acme/support:default"):
        refused = await move(asked)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_overflow"), asked
    assert (await http.put(f"{base}/aliases/default", json={"version": 2})).json()["overflow"] == "acme/support@2"
    assert (await move(None)).json()["overflow"] is None


async def test_sharing_the_bases_cache_is_set_kept_and_ended(
    http: httpx.AsyncClient, base: str, admin_side: AdminSide
) -> None:
    async def move(**fields: Any) -> httpx.Response:
        return await http.put(f"{base}/aliases/default", json={"version": 1, "warm": False, **fields})

    assert (await move()).json()["share_base_cache"] is None
    assert (await move(share_base_cache=256)).json()["share_base_cache"] == 256
    assert (await move()).json()["share_base_cache"] == 256
    assert (await http.get(f"{base}/aliases/default")).json()["share_base_cache"] == 256
    for refused in (0, -1, 1_000_001, 2.5, True, "256"):
        assert (await move(share_base_cache=refused)).status_code == 400, refused
    assert (await move(share_base_cache=None)).json()["share_base_cache"] is None
